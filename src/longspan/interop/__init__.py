"""Weights and vocabularies of other implementations, read without executing them."""
