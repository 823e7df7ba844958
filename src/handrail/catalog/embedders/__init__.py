"""Embedders, which turn text into vectors: the shipped model, and others that an operator can choose."""
