"""How is a tool written? Checking one for its author, and starting a new one."""
