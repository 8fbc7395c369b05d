"""Defaults of context measurements (RECL and ECL), shared by figures, reports and comparisons. docs/recl.md"""

SHARES = {"0.1": 0.1, "0.5": 0.5, "1.0": 1.0}
"""Values of r by name: the share of hardest targets."""
THRESHOLD = 0.01
LONGEST = 1000
STEPS = 10


def even_contexts(longest: int) -> tuple[int, ...]:
    """Ten evenly spaced context lengths up to about `longest`; none if that is less than one token per step."""
    step = longest // STEPS
    return tuple(range(step, step * STEPS + 1, step)) if step else ()
