"""The guard around programs: it protects files and git settings, and checks both after a program has ended."""
