"""The MCP clients that are connected, and the session that each has."""
