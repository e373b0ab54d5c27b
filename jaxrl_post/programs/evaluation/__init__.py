"""Evaluation of a model: answers, constraints, a baseline, results and their page."""
