"""Background jobs: calls that continue after their turn, their output, and views of them."""
