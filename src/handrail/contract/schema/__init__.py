"""Checks by JSON schemas, and estimates of their cost."""
