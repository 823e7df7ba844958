"""How a text becomes words that can be compared."""
