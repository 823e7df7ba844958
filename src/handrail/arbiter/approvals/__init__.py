"""Approvals: the request to a person, the desk that keeps it, and the files that it covers."""
