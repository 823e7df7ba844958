"""The tools for files and text."""
