"""The files that a tool reads and writes, each opened beneath its root."""
