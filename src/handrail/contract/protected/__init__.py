"""The names that tools may not write, or only if a person or a rule that names them allows it."""
