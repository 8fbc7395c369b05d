"""Observers of a training run, one per file."""
