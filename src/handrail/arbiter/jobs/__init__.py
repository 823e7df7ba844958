"""Calls that go on in the background, and what they have put out."""
