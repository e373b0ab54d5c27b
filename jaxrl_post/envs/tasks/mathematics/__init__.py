"""Answers to problems of mathematics: extracted, read whole, and compared."""
