"""The servers in the comparison: how each is installed, configured and started.

Each module says which settings were tried; the benchmark reports the best of them per point.
"""
