"""The declaration of a tool: its spec, manifest, names, requirements and settings, and the ``@tool`` decorator."""
