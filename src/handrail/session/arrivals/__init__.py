"""Events from outside of a session's turns: channels, triggers, notices."""
