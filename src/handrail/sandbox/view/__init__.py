"""The view of a sandboxed process: mounts, protected names, toolchains, users."""
