"""Which calls may run beside each other."""
