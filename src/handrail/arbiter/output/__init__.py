"""The output of a call: its conversion, redaction, truncation, and the files that hold the whole."""
