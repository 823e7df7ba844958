"""What may a model see, and how is a tool found? The view, its prompt, schemas and search."""
