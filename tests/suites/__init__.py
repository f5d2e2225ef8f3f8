"""Contracts as test classes: each implementation inherits its suite and says how to make one."""
