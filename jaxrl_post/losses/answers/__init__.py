"""Losses of whole answers: pairs of them, judged ones, and reward models."""
