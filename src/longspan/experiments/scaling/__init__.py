"""Scaling laws: the loss of finished runs as a function of parameters and tokens. docs/scaling.md"""
