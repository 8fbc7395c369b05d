"""Tasks, fine-tuning, predictions and features. docs/transfer.md"""
