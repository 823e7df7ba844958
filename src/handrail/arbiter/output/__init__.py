"""What a result looks like when it is given back: shaped, shortened, and kept in a file where it is large."""
