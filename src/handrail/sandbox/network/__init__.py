"""The network of a sandboxed process: its permitted hosts, and the proxy that leads to them."""
