"""Which MCP servers an operator has configured, by Handrail's own file and by those of others."""
