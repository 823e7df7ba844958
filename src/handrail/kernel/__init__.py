"""How is everything put together? The only composition root."""
