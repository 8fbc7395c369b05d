"""From a recipe and a text to a trained model, and not a step lost."""
