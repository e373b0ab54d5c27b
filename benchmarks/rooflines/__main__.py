"""`python -m benchmarks.rooflines`: prints tables of docs/explanation/kernels.md."""

from benchmarks.rooflines.tables import main

main()
