"""The commands, one a file, loaded by name."""
