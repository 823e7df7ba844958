"""What happened? The commit log, its verification and retention, and the artifacts that it refers to."""
