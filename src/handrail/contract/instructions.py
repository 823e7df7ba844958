"""A project's instruction files: text for whoever works on it, which grants nothing."""

NAMES = ("AGENTS.md", "CLAUDE.md", "CONTEXT.md")
