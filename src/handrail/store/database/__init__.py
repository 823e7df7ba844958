"""The one database: its connections, its writer, its schema, and how processes hear of changes."""
