"""Constraints of what a model may write, from schemas, grammars and tools."""

from jaxrl_post.serve.grammars.compiler import GrammarError, Grammars

__all__ = ["GrammarError", "Grammars"]
