"""Experiments on top of the library: benchmarks, comparisons, figures, reports and the demo."""
