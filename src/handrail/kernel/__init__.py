"""How is it all put together? The only composition root."""
