"""The skills that a session has, and the files they are in."""
