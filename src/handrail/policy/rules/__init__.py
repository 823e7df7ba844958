"""Rules: how they are written, checked and matched, and the sets that modes and agents have of them."""
