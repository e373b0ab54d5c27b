"""Prints the tables of docs/kernels.md: `python -m benchmarks.rooflines`."""

from benchmarks.rooflines.tables import main

main()
