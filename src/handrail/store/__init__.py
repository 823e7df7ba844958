"""Where is state kept? The database, lease, folders and decisions of a workspace."""
