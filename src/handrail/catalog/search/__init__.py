"""The search for tools: by words, by meaning, and with a confidence for each hit."""
