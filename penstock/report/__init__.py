"""Reports of runs, comparisons, optimisations and profiles: tables, HTML pages, figures."""
