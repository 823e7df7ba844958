"""The client of MCP: its transports, its conversation, and what a server asks of it."""
