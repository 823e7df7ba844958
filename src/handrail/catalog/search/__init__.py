"""How a tool is found that serves a need: by words, by meaning, and how sure that is."""
