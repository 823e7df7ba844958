"""The tables of the database, one to three in each file."""
