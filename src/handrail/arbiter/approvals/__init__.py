"""A person is asked: the request, the desk where it waits, and the answer."""
