"""Which tools are there? Agents, sources, their loading into generations, and approved definitions."""
