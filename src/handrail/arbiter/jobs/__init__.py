"""Calls that continue in the background, and their output."""
