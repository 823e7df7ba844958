"""The frontends of the kernel: the command line, the MCP server and the ACP agent."""
