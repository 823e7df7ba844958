"""The tables of the database, one or two a file."""
