"""The locks that decide which calls may run at the same time."""
