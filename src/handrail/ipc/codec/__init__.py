"""How values become data on the wire, and data becomes values."""
