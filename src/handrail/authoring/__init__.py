"""How is a tool written? A linter, templates of new tools, and the import of MCP servers."""
