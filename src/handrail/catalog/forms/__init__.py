"""The form in which a provider of models takes tools and their schemas."""
