"""How does a model's turn run? The loop of one model, its conversation, providers and sub-agents."""
