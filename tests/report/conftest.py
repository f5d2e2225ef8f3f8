"""A made-up profile."""

from made_profiles import gpu, peaks, profile

__all__ = ["gpu", "peaks", "profile"]
