"""Secrets are taken out of everything that leaves the arbiter."""
