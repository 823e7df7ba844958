"""The services that a tool reaches through its runtime: files, jobs, agents, channels, terminals, memory. One Protocol a file."""
