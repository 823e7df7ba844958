"""The commands, one or two in each file, loaded by name."""
