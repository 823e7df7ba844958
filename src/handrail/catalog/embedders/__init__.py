"""How a text becomes a vector: the model that ships, and others that an operator names."""
