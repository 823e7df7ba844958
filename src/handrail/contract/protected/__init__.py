"""The names that tools may not write, or only where somebody says so."""
