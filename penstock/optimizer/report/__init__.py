"""Reports of an optimisation: first line, table, page and file; and its progress while it runs."""
