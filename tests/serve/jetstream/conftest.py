"""A tiny model behind JetStream's gRPC server, and our own engine to compare with."""

import contextlib
import dataclasses
import importlib.util
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from tests import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, vocab_size=320, max_length=128)
# Slots are fewer than the prompts of the tests. A prompt has up to three pages.
SIZES = EngineConfig(num_slots=4, max_prompt_tokens=40, max_tokens=24)
# Seconds; what a wait without an end would be cut off by.
DEADLINE = 120.0

needs_jetstream = pytest.mark.skipif(
    importlib.util.find_spec("jetstream") is None,
    reason="needs the extra jetstream: make check-jetstream",
)


class Stream(NamedTuple):
    """The stream that a client was sent."""

    ids: tuple[int, ...]
    text: str


def crc(prompt: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt, np.int32).tobytes())


def make_tokenizer(*more_stops: int) -> Tokenizer:
    """Ids of bytes and a few merged ones; without a post-processor."""
    trained = Tokenizer.train(["the answer is twelve, user"] * 3, vocab_size=290)
    return Tokenizer(
        trained.backend,
        stop_ids=(trained.eos_id, *more_stops),
        special_tokens=trained.special_tokens,
        num_embeddings=CONFIG.vocab_size,
    )


def prompts(count: int = 8) -> list[tuple[int, ...]]:
    """Lengths of one to three pages: short, a whole page, one more, the longest."""
    rng = np.random.default_rng(3)
    lengths = [1, 5, 15, 16, 17, 31, 33, SIZES.max_prompt_tokens][:count]
    return [tuple(rng.integers(2, 290, length).tolist()) for length in lengths]


def expected(params, wanted, sampling, *, mesh=None, seed=0, first_sample=0):
    """Tokens that our engine samples, with the stop token, by prompt."""
    engine = Engine(CONFIG, SIZES, mesh=mesh, seed=seed)
    requests = [
        Request(crc(prompt), prompt, first_sample=first_sample, sampling=sampling)
        for prompt in wanted
    ]
    done = engine.generate(params, requests)
    return [tuple(completion.tokens.ids.tolist()) for completion in done]


def greedy(tokenizer: Tokenizer, max_tokens: int = SIZES.max_tokens) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, stop_ids=tokenizer.stop_ids
    )


def without_stop(ids: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The messages of a completion that JetStream sends."""
    return ids[:-1] if ids[-1] in tokenizer.stop_ids else ids


@contextlib.contextmanager
def calls(port: int) -> Iterator[tuple[Any, Any]]:
    """The function that asks a server, and the type of its requests."""
    import grpc  # type: ignore[reportMissingImports]
    from jetstream.core.proto import (  # type: ignore[reportMissingImports]
        jetstream_pb2,
        jetstream_pb2_grpc,
    )

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        yield stub.Decode, jetstream_pb2.DecodeRequest


def ask(
    port: int, content: str | Sequence[int], max_tokens: int, session: str = ""
) -> Stream:
    """A request over gRPC; a call that does not end in time is an error."""
    ids: list[int] = []
    text = ""
    with calls(port) as (decode, asked):
        request = asked(max_tokens=max_tokens, session_cache=session)
        if isinstance(content, str):
            request.text_content.CopyFrom(asked.TextContent(text=content))
        else:
            request.token_content.CopyFrom(asked.TokenContent(token_ids=content))
        for response in decode(request, timeout=DEADLINE):
            (sample,) = response.stream_content.samples
            ids += sample.token_ids
            text += sample.text
    return Stream(tuple(ids), text)


def ask_together(port: int, contents, max_tokens: int) -> list[Stream]:
    """Requests that run at the same time."""
    with ThreadPoolExecutor(len(contents)) as pool:
        asked = [pool.submit(ask, port, each, max_tokens) for each in contents]
        return [future.result(DEADLINE) for future in asked]
