"""One run shown in many ways: a table, a CSV file, a page, a comparison."""
