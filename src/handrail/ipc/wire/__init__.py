"""One connection between two processes: frames, operations, the greeting, and where the holder is met."""
