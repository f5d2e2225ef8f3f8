"""Kernels of our own, in Triton. A file here imports Triton when it is imported, so whoever uses it
imports it where it is needed, and has another way where there is none."""
