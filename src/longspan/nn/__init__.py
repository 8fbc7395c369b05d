"""Modules without memory, shared by the families."""
