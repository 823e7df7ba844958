"""The client of MCP: its transports, its conversation, and the requests of a server."""
