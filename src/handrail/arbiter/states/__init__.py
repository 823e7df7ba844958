"""Stateful tools: what is open, and the steps that are taken with it."""
