"""Recipes compared under one budget: trained on the same text, scored and measured the same way. docs/compare.md"""
