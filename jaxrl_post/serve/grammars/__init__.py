"""Constraints of what a model may write, from schemas, grammars and tools."""
