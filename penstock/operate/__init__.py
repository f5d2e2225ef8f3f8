"""What happens to a version after its commit: promotion, rollouts, drift, scaling."""
