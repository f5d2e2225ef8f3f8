"""A made-up profile."""

from optimizer.profile.made_profiles import gpu, peaks, profile

__all__ = ["gpu", "peaks", "profile"]
