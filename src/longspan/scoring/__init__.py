"""Scoring: per-token losses of a text, their mean, and how much context a model uses."""
