"""What comes to a session from outside of its turns: channels, triggers, notices."""
