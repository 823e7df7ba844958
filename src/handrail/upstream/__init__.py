"""How are other MCP servers reached?

Upstream MCP servers as sources of tools: one owner each, connected on first use, listed from a cache before.

- ``definition``: what an operator says of a server · ``installed``: which program that is · ``listing``: what it said it has
- ``owner``: the one task that keeps a connection · ``conversation``: what is said on it · ``asks``: what the server asks
- ``stdio``, ``http``, ``sse``, ``dialling``, ``oauth``: how it is reached
- ``source``, ``tools``, ``offering``: what the registry sees

Nothing here is imported before a server is configured, and nothing of the MCP SDK before a server is reached over HTTP.
"""
