"""Argument checks by JSON Schema, estimates of their cost, and the schemas that the kernel fixes."""
