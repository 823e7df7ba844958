"""One call as the arbiter has it, what it was given, and what comes of it."""
