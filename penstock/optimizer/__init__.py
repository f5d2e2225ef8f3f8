"""Optimise a trained model until it meets its SLO."""
