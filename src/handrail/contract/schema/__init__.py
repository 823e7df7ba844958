"""What fits a JSON schema, and how much work a check is before it is made."""
