"""What can a tool touch? Files, search, network, shell and secrets, and the guard of protected files."""
