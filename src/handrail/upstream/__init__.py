"""How are other MCP servers reached? The client of upstream servers, which serve as sources of tools.

Each server has one owner, is connected on first use, and lists its tools from a cache before that.

- ``server_config_loader`` and ``server_definition``: the operator's settings · ``server_programs``: installed programs
- ``upstream_connection``: the task that keeps a connection · ``upstream_registry``: all servers of a workspace
- ``client``: the protocol, its transports, and the server's requests · ``oauth_sign_in``: sign-in
- ``mcp_source``, ``mcp_tool``: the registry's view of a server

Nothing here is imported before a server is configured. The MCP SDK is imported when a server is first reached over HTTP.
"""
