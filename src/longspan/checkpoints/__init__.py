"""Models, checkpoints and states on disk: written whole, verified on every load; and weights of other codes."""
