"""Writing: choosing tokens, and sessions that carry a stream on."""
