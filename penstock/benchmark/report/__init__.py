"""Reports of a run: a table, a CSV file, an HTML page, a comparison."""
