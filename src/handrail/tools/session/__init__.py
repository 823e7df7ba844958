"""The tools for what a session itself has: its plan, its notes, its skills, its questions."""
