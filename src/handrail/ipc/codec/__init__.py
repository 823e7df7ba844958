"""The conversion between values and data on the wire."""
