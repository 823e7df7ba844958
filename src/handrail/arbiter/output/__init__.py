"""The form of a result: shaped, shortened, and kept in a file if it is large."""
