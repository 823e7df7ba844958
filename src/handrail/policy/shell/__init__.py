"""Shell commands: their parsing, the programs that they start, and a proof that they only read."""
