"""Turns rewards into advantages of samples or of their tokens."""
