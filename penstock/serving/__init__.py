"""How one request is answered: planned, placed in a slab, batched, run in a worker, replied to."""
