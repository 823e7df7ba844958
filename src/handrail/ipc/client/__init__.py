"""The client's side: its sessions and tools, and the connection to the current lease holder."""
