"""The MCP server over HTTP: connections, streams that continue, and who may come."""
