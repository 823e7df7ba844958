"""Which hosts a sandboxed process reaches, and the proxy through which it does."""
