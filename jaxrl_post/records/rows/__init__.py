"""Rows of a run's logs that take some making: conversations and evaluations."""
