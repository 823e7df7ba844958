"""A reply as it comes in: its pieces, its calls, its repetition where a connection broke."""
