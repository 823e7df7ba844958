"""Which commands a shell text runs, and which of them only read."""
