"""`penstock optimize` for language models."""
