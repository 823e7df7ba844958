"""What does the operating system enforce? The view, filters, network and start of sandboxed programs."""
