"""Child processes: one way to start, talk to, watch, restart and end them."""
