"""What crosses a segment boundary."""
