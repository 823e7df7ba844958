"""What *is* a tool? Pure types and Protocols: no I/O, and no import of another room."""
