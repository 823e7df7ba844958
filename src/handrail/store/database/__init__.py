"""The database: its connections, writer, journal, schema, and wake-up signals between threads."""
