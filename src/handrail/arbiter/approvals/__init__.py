"""Approvals: the requests to users, their answers, and the files that an approval covers."""
