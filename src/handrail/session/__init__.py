"""What does one conversation hold? Its turns, past, arrivals, skills and resumption."""
