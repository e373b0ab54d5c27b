"""Prints the tables of docs/explanation/kernels.md: `python -m benchmarks.rooflines`."""

from benchmarks.rooflines.tables import main

main()
