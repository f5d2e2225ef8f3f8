"""An optimisation shown: its first line, a table, a page, a file; and how it goes on meanwhile."""
