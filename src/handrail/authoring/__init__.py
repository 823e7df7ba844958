"""How is a tool written? What checks one for its author, begins one, and freezes an agent's tools into a bundle."""
