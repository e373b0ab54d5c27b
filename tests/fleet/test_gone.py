"""Samplers that are gone bring no payloads to others."""

import time

import pytest

from jaxrl_post.fleet.holders import Send, Wait
from jaxrl_post.fleet.hub import Hub
from jaxrl_post.fleet.leases import UnknownSamplerError
from jaxrl_post.fleet.ledger import member_of
from jaxrl_post.fleet.orders import News, PolicyVersion

FACTS = {"url": "", "slots": 1}


def silent(hub: Hub, name: str, epoch: int) -> None:
    del epoch
    hub.leases.members[name].heard = time.monotonic() - 2 * hub.silence_s
    hub.collect(PolicyVersion(0, "digest"), 0.0)


def joins_again(hub: Hub, name: str, epoch: int) -> None:
    """Its process was started again after it had been silent."""
    del epoch
    hub.leases.members[name].heard = time.monotonic() - 2 * hub.silence_s
    hub.join({**FACTS, "name": name})


def tells_nonsense(hub: Hub, name: str, epoch: int) -> None:
    with pytest.raises(UnknownSamplerError):
        hub.hear(name, epoch, News(7))


@pytest.mark.parametrize("gone", [silent, joins_again, tells_nonsense])
def test_who_is_gone_brings_no_payloads(gone):
    """Otherwise each payload that it was sent is waited for, 20 s long."""
    hub = Hub(b"", lambda facts: "")
    epochs = {name: hub.join({**FACTS, "name": name}) for name in ("a", "b", "c")}
    a, b, c = (member_of(name, epoch) for name, epoch in epochs.items())
    assert [hub.ask("key", each) for each in (a, b)] == [Send(), Send()]
    assert hub.ask("key", c) == Wait((a, b))
    for name in ("a", "b"):
        gone(hub, name, epochs[name])
    assert hub.ask("key", c) == Send()
