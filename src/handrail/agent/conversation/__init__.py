"""The conversation with a model, and how it is kept within bounds."""
