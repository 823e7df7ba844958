"""Undo: the files that calls change are kept before, and can be given back."""
