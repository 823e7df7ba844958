"""What is said to a model and what it said, and how that is kept within bounds."""
