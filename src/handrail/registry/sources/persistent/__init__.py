"""Tools that are programs which keep running between calls."""
