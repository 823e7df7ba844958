"""The system's filters and limits: system calls, paths by Landlock, memory and processes."""
