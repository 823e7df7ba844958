"""The side that joined: its sessions, its tools, and how it finds the next holder."""
