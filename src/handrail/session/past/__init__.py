"""The history of a session, which also survives a restart."""
