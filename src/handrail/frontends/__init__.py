"""How does a person or a program reach the kernel? The command line, the MCP server and the ACP agent."""
