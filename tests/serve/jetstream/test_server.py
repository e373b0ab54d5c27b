"""JetStream's orchestrator and gRPC server stream what our own engine samples."""

import collections
import queue
import socket
import threading
import time
import types

import jax
import pytest

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.sampler import EngineConfig, SamplingParams
from jaxrl_post.serve.jetstream import jetstream_engine, jetstream_server, library
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.serve.jetstream.conftest import (
    CONFIG,
    DEADLINE,
    SIZES,
    ask,
    ask_together,
    calls,
    expected,
    greedy,
    make_tokenizer,
    needs_jetstream,
    prompts,
    without_stop,
)

pytestmark = needs_jetstream

MAX_TOKENS = SIZES.max_tokens
GREEDY = SamplingParams(temperature=0.0)


def make_engine(tokenizer, params, sampling=GREEDY, **options):
    return jetstream_engine(
        params,
        CONFIG,
        tokenizer,
        EngineConfig(
            num_slots=SIZES.num_slots,
            max_prompt_tokens=SIZES.max_prompt_tokens,
            max_tokens=MAX_TOKENS,
        ),
        sampling,
        **options,
    )


@pytest.fixture(scope="module")
def params():
    return tiny.params(CONFIG)


@pytest.fixture(scope="module")
def tokenizer(params) -> Tokenizer:
    """A stop id other than the end of sequence occurs in several streams."""
    plain = make_tokenizer()
    streams = expected(params, prompts(), greedy(plain))
    later = collections.Counter(token for ids in streams for token in {*ids[3:]})
    first = {token for ids in streams for token in ids[:3]}
    stop = next(t for t, _ in later.most_common() if t not in first)
    return make_tokenizer(stop)


@pytest.fixture(scope="module")
def streams(params, tokenizer):
    """Our engine's greedy samples, with the stop tokens."""
    return expected(params, prompts(), greedy(tokenizer))


@pytest.fixture(scope="module")
def port(params, tokenizer):
    engine = make_engine(tokenizer, params)
    with jetstream_server(engine) as opened:
        yield opened
    # Prompts are prefilled in three lengths; what a slot holds does not matter.
    made = engine.compilations
    assert made["prefill"] <= 3
    assert made["insert"] == made["generate"] == 1


def test_greedy_streams_are_those_of_our_engine(port, tokenizer, streams):
    stopped = [ids[-1] == tokenizer.stop_ids[1] for ids in streams]
    assert 2 <= sum(stopped) < len(streams) > SIZES.num_slots
    # Twice: the second time every slot has been used before.
    for _ in range(2):
        found = ask_together(port, prompts(), MAX_TOKENS)
        assert [s.ids for s in found] == [without_stop(s, tokenizer) for s in streams]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_a_request_has_a_maximum_of_its_own(port, tokenizer, streams, max_tokens):
    found = ask_together(port, prompts(), max_tokens)
    wanted = [without_stop(ids, tokenizer) for ids in streams]
    assert [s.ids for s in found] == [ids[:max_tokens] for ids in wanted]


def test_a_text_is_answered_by_a_text(port, params, tokenizer):
    texts = ["the answer", "user, twelve", "12+30=ü"]
    wanted = expected(params, map(tokenizer.encode, texts), greedy(tokenizer))
    wanted = [without_stop(ids, tokenizer) for ids in wanted]
    found = ask_together(port, texts, MAX_TOKENS)
    assert [stream.ids for stream in found] == wanted
    # Random tokens are random bytes, and few are characters.
    assert [stream.text for stream in found] == [
        tokenizer.decode(ids) for ids in wanted
    ]


def test_the_last_stream_may_end_at_any_moment(params, tokenizer, monkeypatch):
    """JetStream's own generate thread fails here, and then ends the process."""
    orchestrator = library.load().orchestrator
    run, failures = orchestrator.Driver._generate_thread, []

    class Slots(queue.Queue):
        def put(self, item, block=True, timeout=None):
            super().put(item, block, timeout)
            if threading.current_thread().name == "generate-0" and not block:
                # It has seen that there is no request. Now the last stream ends.
                deadline = time.monotonic() + 10.0
                while self.qsize() < self.maxsize and time.monotonic() < deadline:
                    time.sleep(0.001)

    def noticed(driver, index):
        try:
            run(driver, index)
        except AssertionError as error:
            failures.append(error)
            raise

    queues = types.SimpleNamespace(Queue=Slots, Empty=queue.Empty, Full=queue.Full)
    monkeypatch.setattr(orchestrator, "queue", queues)
    monkeypatch.setattr(orchestrator.Driver, "_generate_thread", noticed)
    (wanted,) = expected(params, [prompts()[1]], greedy(tokenizer, 2))
    with jetstream_server(make_engine(tokenizer, params)) as port:
        for _ in range(3):
            assert ask(port, prompts()[1], 2).ids == wanted
    assert failures


@pytest.mark.parametrize(
    ("content", "max_tokens", "session", "message"),
    [
        ([], 4, "", "a prompt must have 1 to 40 tokens; got 0"),
        ([5] * 41, 4, "", "a prompt must have 1 to 40 tokens; got 41"),
        ("user " * 40, 4, "", "a prompt must have 1 to 40 tokens; got"),
        ("", 4, "", "a prompt must have 1 to 40 tokens; got 0"),
        ([5, 320], 4, "", r"token ids must lie in 0\.\.319; got 320"),
        ([5, -1], 4, "", r"token ids must lie in 0\.\.319; got -1"),
        ([5], 0, "", "max_tokens must be 1 to 24; got 0"),
        ([5], 25, "", "max_tokens must be 1 to 24; got 25"),
        ([5], 4, "mine", "session_cache must be empty, there are no sessions; got"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(
    port, content, max_tokens, session, message
):
    import grpc  # type: ignore[reportMissingImports]

    with pytest.raises(grpc.RpcError, match=message) as refused:
        ask(port, content, max_tokens, session)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    # The server continues.
    assert len(ask(port, prompts()[1], 1).ids) == 1


def test_a_request_without_a_prompt_is_refused(port):
    import grpc  # type: ignore[reportMissingImports]

    with calls(port) as (decode, request), pytest.raises(grpc.RpcError) as refused:
        list(decode(request(max_tokens=4), timeout=DEADLINE))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "a request must have text_content" in str(refused.value.details())


def test_a_client_that_leaves_disturbs_nobody(port, tokenizer, streams):
    with calls(port) as (decode, request):
        for _ in range(SIZES.num_slots + 1):
            content = request.TokenContent(token_ids=prompts()[1])
            call = decode(
                request(token_content=content, max_tokens=MAX_TOKENS), timeout=DEADLINE
            )
            next(call)
            call.cancel()
    found = ask_together(port, prompts(), MAX_TOKENS)
    assert [s.ids for s in found] == [without_stop(ids, tokenizer) for ids in streams]


def test_only_this_machine_is_listened_to(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    # All of 127.0.0.0/8 is this machine: who listens everywhere listens here too.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)


def test_a_port_that_is_taken_is_named(port, params, tokenizer):
    engine = make_engine(tokenizer, params)
    taken = pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {port}")
    with taken, jetstream_server(engine, port=port):
        pass


SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}


def test_samples_are_those_of_our_engine_in_any_slot(params, tokenizer):
    sampling = SamplingParams(
        **SAMPLING, max_tokens=MAX_TOKENS, stop_ids=tokenizer.stop_ids
    )
    engine = make_engine(tokenizer, params, SamplingParams(**SAMPLING), seed=7)
    first = None
    with jetstream_server(engine) as port:
        for index in range(2):
            # The second time in another order: a prompt meets another slot, and gets
            # its second sample.
            order = prompts()[::-1] if index else prompts()
            wanted = expected(params, order, sampling, seed=7, first_sample=index)
            found = [stream.ids for stream in ask_together(port, order, MAX_TOKENS)]
            assert found == [without_stop(ids, tokenizer) for ids in wanted]
            assert sorted(found) != first
            first = sorted(found)


@pytest.mark.meshes
def test_streams_on_a_mesh_are_those_of_our_engine(tokenizer):
    mesh = create_mesh("tp2", jax.devices()[:2])
    params = tiny.params(CONFIG, mesh=mesh)
    wanted = expected(params, prompts(), greedy(tokenizer), mesh=mesh)
    engine = make_engine(tokenizer, params, mesh=mesh)
    with jetstream_server(engine) as port:
        found = ask_together(port, prompts(), MAX_TOKENS)
    assert [s.ids for s in found] == [without_stop(ids, tokenizer) for ids in wanted]
