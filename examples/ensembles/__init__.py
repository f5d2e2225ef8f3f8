"""Ensembles with published weights. `prepare.py` writes them, `ask.py` asks them."""
