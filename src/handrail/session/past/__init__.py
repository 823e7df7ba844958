"""What a session keeps of what was said and done in it, also over a restart."""
