"""The tools for files and texts."""
