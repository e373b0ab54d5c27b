"""Loads JetStream 0.2.2, which is archived and older than the JAX that runs here.

What stands in its way is put right where it is loaded, and nowhere else.
"""

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import jax

from jaxrl_post.extras import install

__all__ = ["JetStream", "load"]

VERSION = "0.2.2"


class JetStream(NamedTuple):
    """The modules of JetStream that the adapter needs, and gRPC."""

    engine_api: Any
    token_utils: Any
    tokenizer_api: Any
    tokenizer_pb2: Any
    orchestrator: Any
    server_lib: Any
    grpc: Any


@functools.cache
def load() -> JetStream:
    """JetStream's modules.

    Raises:
        ModuleNotFoundError: JetStream, or a package that it needs, is not installed.
    """
    try:
        with _root_logger_as_it_is(), _stand_in_for_seqio():
            modules = JetStream(
                importlib.import_module("jetstream.engine.engine_api"),
                importlib.import_module("jetstream.engine.token_utils"),
                importlib.import_module("jetstream.engine.tokenizer_api"),
                importlib.import_module("jetstream.engine.tokenizer_pb2"),
                importlib.import_module("jetstream.core.orchestrator"),
                importlib.import_module("jetstream.core.server_lib"),
                importlib.import_module("grpc"),
            )
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"serve.jetstream needs the extra jetstream ({error}): "
            f"{install('jetstream')}, then pip install --no-deps "
            f"google-jetstream=={VERSION}, which would otherwise install TensorFlow",
            name=error.name,
        ) from error
    # It calls jax.tree_map, which JAX no longer has. Its generate thread would fail
    # at the first prefix, and its threads end the process by SIGKILL when they fail.
    modules.orchestrator.delete_pytree = _delete
    return modules


def _delete(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


@contextmanager
def _root_logger_as_it_is() -> Iterator[None]:
    """The orchestrator sets the root logger to DEBUG and gives it a handler."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextmanager
def _stand_in_for_seqio() -> Iterator[None]:
    """seqio, a tokenizer of TensorFlow, is imported for two names that go unused."""
    try:
        found = importlib.util.find_spec("seqio") is not None
    except ValueError:  # a module without a spec is there
        found = True
    if found:
        yield
        return
    package, vocabularies = ModuleType("seqio"), ModuleType("seqio.vocabularies")
    for name in ("Vocabulary", "SentencePieceVocabulary"):
        setattr(vocabularies, name, type(name, (), {}))
    sys.modules.update({"seqio": package, "seqio.vocabularies": vocabularies})
    try:
        yield
    finally:
        # No other module shall find this in place of seqio.
        del sys.modules["seqio"], sys.modules["seqio.vocabularies"]
