"""A group of recipes under one budget: trained, scored and measured side by side."""
