"""How well a model predicts: likelihood of a stream, with memory or by a sliding window."""
