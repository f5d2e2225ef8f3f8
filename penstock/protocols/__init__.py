"""Protocols: translate between clients and Servables, and know nothing else."""
