"""How is a tool written? Checking one for its author, starting a new one, and freezing an agent's tools into a bundle."""
