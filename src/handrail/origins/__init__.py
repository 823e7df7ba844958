"""Where does the kernel's own code come from?

Where the kernel's own code and programs may come from: never from a workspace that is open."""
