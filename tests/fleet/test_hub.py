"""The trainer's hub: which requests for orders are held, and what ends the wait."""

import asyncio

import numpy as np
import pytest

from jaxrl_post.fleet import hub as hubs
from jaxrl_post.fleet.hub import Hub
from jaxrl_post.fleet.leases import News, PolicyVersion
from jaxrl_post.sampler import Request, SamplingParams

ARRAYS = [("w", [(((0, 4),), np.arange(4, dtype=np.float32))])]
REQUEST = Request(0, (1, 2), 4, sampling=SamplingParams(max_tokens=8))


@pytest.fixture
def hub(monkeypatch):
    # A request that nothing wakes is held for longer than a test waits.
    monkeypatch.setattr(hubs, "HOLD_S", 60.0)
    return Hub(welcome=b"", refusal=lambda facts: "")


def facts(name):
    return {"name": name, "url": "", "slots": 4}


async def never():
    await asyncio.Event().wait()


async def held(hub, name, epoch, known):
    """A request for orders that waits at the hub."""
    task = asyncio.ensure_future(hub.orders(name, epoch, 0, known, never))
    while not hub.leases.members[name].present:
        await asyncio.sleep(0)
    return task


def test_a_sampler_that_gets_ready_later_is_given_what_waits(hub):
    """It holds a request from before it was ready; another sampler began already."""

    async def run():
        hub.attach(asyncio.get_running_loop())
        policy = PolicyVersion(0, hub.catalogue.add(0, ARRAYS).digest)
        hub.published()
        first, later = (hub.join(facts(name)) for name in ("first", "later"))
        hub.hear("first", first, News(1, ready=(policy.digest,)))
        job = hub.begin(policy)
        assert hub.ready(policy, 0.0)
        hub.submit(REQUEST, policy, job)
        known = (await hub.orders("later", later, 0, -1, never))["known"]
        task = await held(hub, "later", later, known)
        hub.hear("later", later, News(1, ready=(policy.digest,)))
        reply = await asyncio.wait_for(task, 10)
        assert reply["orders"]

    asyncio.run(run())
