"""May this call run? Rules, shell commands, capabilities and watchdogs decide."""
