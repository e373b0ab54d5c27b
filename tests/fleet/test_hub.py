"""The trainer's hub: which requests for orders are held, and what ends the wait."""

import asyncio
import time

import numpy as np
import pytest

from jaxrl_post.fleet import hub as hubs
from jaxrl_post.fleet.hub import FleetError, Hub, NameTakenError
from jaxrl_post.fleet.orders import News, PolicyVersion
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


def test_a_name_of_a_sampler_that_is_alive_is_refused(hub):
    """It would displace the other one, and be displaced, for ever."""
    epoch = hub.join(facts("one"))
    with pytest.raises(NameTakenError, match="a sampler named one has joined and is"):
        hub.join(facts("one"))
    assert hub.leases.members["one"].epoch == epoch
    hub.leave("one", epoch, "it was stopped")
    assert hub.join(facts("one")) > epoch


def test_a_name_is_free_once_its_sampler_was_silent(hub):
    epoch = hub.join(facts("one"))
    hub.leases.members["one"].heard -= 2 * hub.silence_s
    assert hub.join(facts("one")) > epoch


def test_a_server_that_ends_holds_no_request(hub):
    async def run():
        hub.attach(asyncio.get_running_loop())
        epoch = hub.join(facts("one"))
        known = (await hub.orders("one", epoch, 0, -1, never))["known"]
        task = await held(hub, "one", epoch, known)
        hub.release()
        reply = await asyncio.wait_for(task, 10)
        assert reply["orders"] == []
        assert reply["ended"] == ""

    asyncio.run(run())


def test_a_death_that_silence_tells_wakes_the_others(hub):
    """The samples of the dead one are granted at once, not when a request ends."""

    async def run():
        hub.attach(asyncio.get_running_loop())
        policy = PolicyVersion(0, hub.catalogue.add(0, ARRAYS).digest)
        hub.published()
        first, other = (hub.join(facts(name)) for name in ("first", "other"))
        for name, epoch in (("first", first), ("other", other)):
            hub.hear(name, epoch, News(1, ready=(policy.digest,)))
        job = hub.begin(policy)
        assert hub.ready(policy, 0.0)
        known = (await hub.orders("other", other, 0, -1, never))["known"]
        hub.submit(REQUEST, policy, job)
        granted = await hub.orders("first", first, 0, -1, never)
        assert granted["orders"]
        task = await held(hub, "other", other, known)
        hub.leases.members["first"].heard -= 2 * hub.silence_s
        assert hub.collect(policy, 0.0) == []
        reply = await asyncio.wait_for(task, 10)
        assert reply["orders"]

    asyncio.run(run())


def test_the_metric_of_the_probe_is_of_the_newest_version_and_the_worst_sampler(hub):
    digests = [
        hub.catalogue.add(version, [("w", [(((0, 1),), np.full(1, version, "f4"))])])
        for version in (4, 5)
    ]
    old, new = (made.digest for made in digests)
    epochs = {name: hub.join(facts(name)) for name in ("a", "b")}
    assert "mismatch/probe" not in hub.counts()
    hub.hear("a", epochs["a"], News(1, ready=(old,), probed={old: 0.5}))
    assert hub.counts()["mismatch/probe"] == 0.5
    for name, apart in (("a", 0.001), ("b", 0.002)):
        probed = {old: 0.5, new: apart}
        hub.hear(name, epochs[name], News(2 - (name == "b"), probed=probed))
    assert hub.counts()["mismatch/probe"] == 0.002


@pytest.mark.parametrize("joined", [True, False])
def test_a_trainer_that_is_told_to_end_waits_a_little(hub, monkeypatch, joined):
    """Samplers that have joined are about to have the version of its last step."""
    monkeypatch.setattr(hubs, "ENDING_S", 0.5 if joined else 1e9)
    monkeypatch.setattr(hubs, "SHORT_S", 1e9 if joined else 0.5)
    hub.should_stop = lambda: True
    policy = PolicyVersion(0, hub.catalogue.add(0, ARRAYS).digest)
    if joined:
        epoch = hub.join(facts("first"))
    begin = time.monotonic()
    assert not hub.ready(policy, 0.1)

    def wait() -> None:
        while not hub.ready(policy, 0.1):
            pass

    with pytest.raises(FleetError, match="told to end while 0 of 1 were ready"):
        wait()
    assert time.monotonic() - begin > 0.5
    if joined:
        hub.hear("first", epoch, News(1, ready=(policy.digest,)))
        assert hub.ready(policy, 0.1)
