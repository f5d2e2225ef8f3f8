"""How the serving overhead is measured: requests, load, processes, records, reports."""
