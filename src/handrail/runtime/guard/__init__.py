"""What a program may have left behind: protected names and git's settings, looked at again after it has run."""
