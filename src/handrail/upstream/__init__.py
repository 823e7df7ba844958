"""How are other MCP servers reached? The client of upstream servers, which serve as sources of tools.

Each server has one owner, is connected on first use, and lists its tools from a cache before that.

- ``server_config`` and ``definition``: the operator's settings · ``package_installer``: the installed program of a server
- ``connection_manager``: the task that keeps a connection · ``servers``: all servers of a workspace
- ``client``: the protocol, its transports, and the server's requests · ``oauth``: sign-in
- ``source``, ``tools``: the registry's view of a server

Nothing here is imported before a server is configured. The MCP SDK is imported when a server is first reached over HTTP.
"""
