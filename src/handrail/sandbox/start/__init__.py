"""How a process starts within its sandbox: the launcher, its pipes, its terminal, and sandboxes kept ready."""
