"""Rules: their syntax, checks, matching, the shipped ones, and modes."""
