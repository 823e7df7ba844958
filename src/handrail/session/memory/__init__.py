"""The memory of one session: its indexed past, and the checks before knowledge is stored."""
