"""How a trained model meets its SLO."""
