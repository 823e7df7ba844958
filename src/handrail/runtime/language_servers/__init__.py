"""Language servers: their programs, their processes, and what they answer about the code below the roots."""
