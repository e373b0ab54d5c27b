"""Requests that are taken back from the sampler and continue with other parameters."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.serve.grammars.compiler import Grammars
from jaxrl_post.serve.service import Service
from tests import tiny
from tests.serve.conftest import CONFIG

SIZES = EngineConfig(num_slots=4, max_prompt_tokens=32, max_tokens=32, steps_per_call=3)
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def engine(tokenizer) -> Engine:
    return Engine(CONFIG, SIZES, detokenize=tokenizer.decode)


def run(engine, requests, *, suspend_after=(), settle_after=()):
    """The last news of each sample; rounds are numbered from 1, versions by round."""
    params = tiny.params(CONFIG)
    service = Service(Published(engine, params, 0), max_samples=64)
    news: dict[tuple[int, int], list] = {}
    for number, request in enumerate(requests):
        request = dataclasses.replace(request, prompt_id=service.new_id())

        def deliver(update, number=number):
            news.setdefault((number, update.sample_index), []).append(update)

        service.submit(request, deliver, partial=True)
    for version in range(1, 64):
        service.pump(Published(engine, params, version), wait_s=0.0)
        if version in suspend_after:
            service.suspend()
            assert not engine.busy
        if version in settle_after:
            service.settle()
        if service.samples == 0:
            break
    assert service.samples == 0
    for updates in news.values():
        lengths = [len(update.tokens) for update in updates]
        assert lengths == sorted(lengths), "what was told is never taken back"
        assert [u.finish_reason is None for u in updates] == [True] * (
            len(updates) - 1
        ) + [False]
    return {key: updates[-1] for key, updates in news.items()}


def requests(tokenizer):
    long = SamplingParams(max_tokens=20, alternatives=True)
    grammar = Grammars(tokenizer, CONFIG.vocab_size).choice(["17171717", "1818181818"])
    return {
        "several samples": [Request(0, PROMPT, 3, 0, long)],
        "two requests": [
            Request(0, PROMPT, 1, 0, long),
            Request(0, (8, 9), 2, 5, dataclasses.replace(long, max_tokens=9)),
        ],
        "a grammar": [Request(0, PROMPT, 2, 0, long, constrain=grammar)],
        "its own noise": [Request(0, PROMPT, 2, 0, long, noise_id=77)],
    }


@pytest.mark.parametrize(
    "kind", ["several samples", "two requests", "a grammar", "its own noise"]
)
@pytest.mark.parametrize("after", [(1,), (2,), (1, 2, 3, 4)])
def test_what_was_suspended_goes_on_as_if_it_had_not_been(
    engine, tokenizer, kind, after
):
    whole = run(engine, requests(tokenizer)[kind])
    found = run(engine, requests(tokenizer)[kind], suspend_after=after)
    assert found.keys() == whole.keys()
    for key, expected in whole.items():
        update = found[key]
        assert update.finish_reason == expected.finish_reason
        assert update.tokens.ids.tolist() == expected.tokens.ids.tolist()
        np.testing.assert_allclose(
            update.tokens.logprobs, expected.tokens.logprobs, atol=1e-5
        )
        assert len(update.alternatives.ids) == len(update.tokens)
        np.testing.assert_array_equal(
            update.alternatives.ids[:, 0], expected.alternatives.ids[:, 0]
        )
    versions = np.concatenate([u.tokens.versions for u in found.values()])
    assert versions.min() <= after[0] < versions.max()


def test_samples_that_stay_in_the_sampler_tell_their_versions(engine, tokenizer):
    [request] = requests(tokenizer)["several samples"]
    found = run(engine, [request], settle_after=(1, 2))
    whole = run(engine, [request])
    for key, update in found.items():
        assert update.tokens.ids.tolist() == whole[key].tokens.ids.tolist()


def test_a_suspended_request_that_is_cancelled_ends_so(engine):
    service = Service(Published(engine, tiny.params(CONFIG), 0), max_samples=4)
    number, news = service.new_id(), []
    sampling = SamplingParams(max_tokens=20)
    service.submit(Request(number, PROMPT, 1, 0, sampling), news.append, partial=False)
    service.pump(Published(engine, tiny.params(CONFIG), 1), wait_s=0.0)
    service.suspend()
    service.cancel(number)
    for version in (2, 3):
        service.pump(Published(engine, tiny.params(CONFIG), version), wait_s=0.0)
    assert [update.finish_reason for update in news] == ["cancelled"]
    assert service.samples == 0
    assert not engine.busy


def test_who_waits_for_a_suspended_request_hears_of_the_end(engine):
    service = Service(Published(engine, tiny.params(CONFIG), 0), max_samples=4)
    news = []
    request = Request(service.new_id(), PROMPT, 1, 0, SamplingParams(max_tokens=20))
    service.submit(request, news.append, partial=False)
    service.pump(Published(engine, tiny.params(CONFIG), 1), wait_s=0.0)
    service.suspend()
    service.abandon()
    assert [update.finish_reason for update in news] == ["cancelled"]
