"""Losses of whole answers: preference pairs, labelled answers, and reward models."""
