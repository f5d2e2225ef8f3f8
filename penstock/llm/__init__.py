"""How tokens are generated."""
