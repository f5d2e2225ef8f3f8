"""Language models: what `penstock optimize` does with them."""
