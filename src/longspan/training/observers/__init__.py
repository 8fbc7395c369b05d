"""What watches a run, one thing per file."""
