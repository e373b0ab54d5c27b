"""Follows the files of a run that may still be written, for a page in a browser."""
