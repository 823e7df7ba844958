"""Protocols of the services that a tool reaches through its runtime: files, jobs, agents, channels, memory."""
