"""Triton's own examples and tests, run against Penstock: what `tests/triton_examples.py` is made
of. Nothing of Triton's is kept here; users bring checkouts of its repositories."""
