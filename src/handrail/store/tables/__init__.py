"""What is kept in the database, one table or two a file."""
