"""A thousand requests on eight slots: none is lost, and none waits for a later one."""

import asyncio
import threading

import httpx
import numpy as np
import pytest

from jaxrl_post.sampler import Request, SamplingParams
from jaxrl_post.serve.service import BusyError, ClosedError
from tests.serve.conftest import listening, make_served

BODY = {"sampling_params": {"max_tokens": 4, "ignore_eos": True}}


async def asked(client, url, number):
    sampling = BODY["sampling_params"] | {"seed": number}
    body = {"token_ids": [number % 300 + 1, 5], "sampling_params": sampling}
    answer = await client.post(f"{url}/inference/v1/generate", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


async def all_at_once(url, numbers):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=300) as client:
        done = []

        async def one(number):
            ids = await asked(client, url, number)
            done.append(number)
            return ids

        return await asyncio.gather(*map(one, numbers)), done


def test_a_thousand_at_once_and_each_gets_its_own_answer(url):
    numbers = list(range(1000))
    answers, done = asyncio.run(all_at_once(url, numbers))
    assert sorted(done) == numbers
    assert {len(ids) for ids in answers} == {4}
    # The same, one after the other.
    few = list(range(0, 1000, 100))
    alone = [asyncio.run(all_at_once(url, [n]))[0][0] for n in few]
    assert [answers[n] for n in few] == alone


def test_requests_are_served_in_the_order_of_their_arrival(tokenizer):
    model = make_served(tokenizer)
    order: list[int] = []
    ended = threading.Event()
    sampling = SamplingParams(max_tokens=4)

    def submit(number):
        def deliver(update):
            if update.finish_reason is not None:
                order.append(number)
                if len(order) == 100:
                    ended.set()

        request = Request(model.service.new_id(), (5, 6), sampling=sampling)
        model.service.submit(request, deliver, partial=False)

    for number in range(100):
        submit(number)
    assert ended.wait(120)
    # Eight slots: only requests that decode at the same time overtake a request.
    assert all(abs(place - number) < 16 for place, number in enumerate(order))
    assert model.service.close(60)


def test_closing_tells_everybody(tokenizer):
    model = make_served(tokenizer)
    reasons: list[str] = []
    sampling = SamplingParams(max_tokens=128)
    for _ in range(50):
        request = Request(model.service.new_id(), (5, 6), sampling=sampling)
        model.service.submit(
            request, lambda update: reasons.append(update.finish_reason), partial=False
        )
    assert model.service.close(60)
    assert len(reasons) == 50
    assert set(reasons) <= {"stop", "length", "cancelled"}
    assert "cancelled" in reasons
    assert model.service.samples == 0
    with pytest.raises(ClosedError, match="shutting down"):
        model.service.submit(request, print, partial=False)


def test_draining_finishes_what_is_under_way(tokenizer):
    model = make_served(tokenizer)
    reasons: list[str] = []
    ended = threading.Event()

    def deliver(update):
        reasons.append(update.finish_reason)
        ended.set()

    request = Request(
        model.service.new_id(), (5, 6), sampling=SamplingParams(max_tokens=9)
    )
    model.service.submit(request, deliver, partial=False)
    model.service.drain()
    assert not model.service.alive
    with pytest.raises(ClosedError):
        model.service.submit(request, print, partial=False)
    assert ended.wait(60)
    assert reasons == ["length"]
    assert model.service.close(60)


def test_the_limit_counts_samples_and_frees_them(tokenizer):
    model = make_served(tokenizer, max_samples=2)
    ended = threading.Semaphore(0)
    sampling = SamplingParams(max_tokens=4)

    def request(count):
        return Request(model.service.new_id(), (5,), count, sampling=sampling)

    model.service.submit(request(2), lambda update: ended.release(), partial=False)
    with pytest.raises(BusyError, match="at most 2 may"):
        model.service.submit(request(1), print, partial=False)
    for _ in range(2):
        assert ended.acquire(timeout=60)
    assert model.service.close(60)


def test_a_request_that_the_sampler_does_not_take_fails_alone(tokenizer):
    model = make_served(tokenizer)
    updates: list = []
    ended = threading.Event()
    made = iter([None])

    def constrain():
        # The second sample's is refused: the first must not be left in the queue.
        if next(made, "over") == "over":
            raise ValueError("no such grammar")
        return Anything()

    def deliver(update):
        updates.append(update)
        if len(updates) == 3:
            ended.set()

    sampling = SamplingParams(max_tokens=2)
    new_id = model.service.new_id
    bad = Request(new_id(), (5,), 2, sampling=sampling, constrain=constrain)
    good = Request(new_id(), (6,), sampling=sampling)
    for request in (bad, good):
        model.service.submit(request, deliver, partial=False)
    assert ended.wait(60)
    assert [update.refused for update in updates] == [True, True, False]
    assert {update.error for update in updates[:2]} == {"no such grammar"}
    assert [update.sample_index for update in updates[:2]] == [0, 1]
    assert updates[2].finish_reason in ("stop", "length")
    assert model.service.samples == 0
    assert model.service.alive
    assert model.service.close(60)


class Anything:
    """A constraint that allows every token."""

    def allowed(self):
        return np.full(10, 2**32 - 1, np.uint32)

    def advance(self, token):
        del token


def test_a_cancelled_request_ends(tokenizer):
    model = make_served(tokenizer)
    reasons: list[str] = []
    ended = threading.Event()

    def deliver(update):
        reasons.append(update.finish_reason)
        ended.set()

    sampling = SamplingParams(max_tokens=128)
    request = Request(model.service.new_id(), (5, 6), sampling=sampling)
    model.service.submit(request, deliver, partial=False)
    model.service.cancel(request.prompt_id)
    model.service.cancel(12345)
    assert ended.wait(60)
    assert reasons == ["cancelled"]
    assert model.service.close(60)


def test_the_metrics_count(url, served):
    text = httpx.get(f"{url}/metrics").text
    before = served.metrics.prompt_tokens._value.get()
    asyncio.run(all_at_once(url, [1, 2]))
    assert served.metrics.prompt_tokens._value.get() == before + 4
    assert "jaxrl_post_requests_total" in text
    assert "jaxrl_post_samples_under_way 0.0" in text


def test_two_servers_share_a_model(served):
    with listening(served) as one, listening(served) as other:
        both = [asyncio.run(all_at_once(at, [7]))[0][0] for at in (one, other)]
    assert both[0] == both[1]
