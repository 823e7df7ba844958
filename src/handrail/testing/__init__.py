"""What do users test with?

Test support for users' own tools and agents. Nothing here is used by the library itself.

- :mod:`handrail.testing.models`: models in process, without a server
- :mod:`handrail.testing.servers`: loopback servers that speak the providers' protocols and check the history
- :mod:`handrail.testing.kernels`: a temporary kernel, scripted people and clients, and a scripted name resolver
- :mod:`handrail.testing.upstreams`: upstream MCP servers with scripted misbehaviour
"""
