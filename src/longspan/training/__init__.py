"""Training: from a recipe and a text to a model, with exact resume."""
