"""The file service of a tool: canonical paths, reading, replacing, and unsaved changes in an editor."""
