"""Benchmarks: speed as a ratio to a baseline measured in the same run. docs/speed.md"""
