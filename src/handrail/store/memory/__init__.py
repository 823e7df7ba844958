"""The memory of agents: the ranking of passages for a query, and the user's stored knowledge."""
