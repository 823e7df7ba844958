"""Where does the kernel's own code come from? Never from a workspace that is open."""
