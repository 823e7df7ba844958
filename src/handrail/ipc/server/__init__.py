"""The lease holder's side: the requests, registrations and sessions of each client process."""
