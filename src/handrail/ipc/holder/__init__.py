"""The side that holds the workspace: what each process that joined may ask for, and has brought."""
