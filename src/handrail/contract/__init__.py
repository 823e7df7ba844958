"""What *is* a tool? Types and Protocols of tools, calls and sessions, without I/O or imports of other rooms."""
