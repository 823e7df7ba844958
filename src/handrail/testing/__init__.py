"""What do users test with?

What users of the library need to test their own tools and agents; nothing here is used by the library itself.

- :mod:`handrail.testing.models`: models in process, without a server
- :mod:`handrail.testing.servers`: loopback servers that speak the providers' protocols and check the history
- :mod:`handrail.testing.kernels`: a resolver that leads where it is told, also elsewhere the second time
"""
