"""Texts that are read with care: JSON, patterns, host names, times, and texts that are made neutral."""
