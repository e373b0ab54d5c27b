"""Tests of BFCL, with the package and with a small one in its place."""

# pytest would import the small package as bfcl_eval, in all tests.
collect_ignore = ["small"]
