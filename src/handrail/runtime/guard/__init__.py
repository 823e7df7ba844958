"""The look at protected names and git's settings after a program has run."""
