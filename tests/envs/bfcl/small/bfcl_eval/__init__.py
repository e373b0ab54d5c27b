"""Stands for the package bfcl-eval, with one API and two conversations."""
