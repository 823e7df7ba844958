"""How does a model's turn run?"""
