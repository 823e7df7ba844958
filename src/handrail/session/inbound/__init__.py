"""Events that reach a session from outside its turns: notifications, channel messages and triggers."""
