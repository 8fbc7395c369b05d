"""Models, checkpoints and states on disk: written atomically, verified on every load."""
