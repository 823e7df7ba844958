"""What the kernel of the system refuses: system calls, paths by Landlock, memory and processes."""
