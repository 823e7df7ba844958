"""What a sandboxed process sees: mounts, protected names, toolchains, users."""
