"""The MCP server over HTTP: its connections, its limits, and the tokens of its clients."""
