"""How fast, as a ratio to a rival in the same run."""
