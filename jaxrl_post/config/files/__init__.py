"""Options in files: of any program, and the suites of evaluations."""
