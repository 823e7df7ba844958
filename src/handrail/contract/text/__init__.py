"""Strict readers of texts: JSON, patterns, host names, and text made safe to show to a model."""
