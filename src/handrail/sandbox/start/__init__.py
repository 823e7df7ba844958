"""The start of a process within its sandbox: launcher, pipes, terminal, and sandboxes kept ready."""
