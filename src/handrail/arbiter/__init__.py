"""How is one call carried out? The nine steps of a call, and the parts that they use."""
