"""The ticks of a sampler of several processes: all of them do the same, in one order.

Process 0 talks to the trainer. In each tick it tells the others what it has heard, and
hears which versions they have fetched. Then all do the same: take orders, try a version
that is everywhere, decode a burst.
"""

import base64
from typing import Any, NamedTuple

from jaxrl_post.fleet import wire
from jaxrl_post.fleet.orders import Grant, Order, PolicyVersion, Revoke
from jaxrl_post.sharding import processes

__all__ = ["Event", "Tick", "together"]

# An order; the policies that are wanted from now on; or None: all orders are void.
type Event = Order | tuple[PolicyVersion, ...] | None


class Tick(NamedTuple):
    """The input of a tick.

    Attributes:
        events: that have come, in their order.
        fetched: digest and attempt of versions that are here and not tried, the oldest
            first.
        stop: whether the sampler ends.
    """

    events: tuple[Event, ...]
    fetched: tuple[tuple[str, int], ...]
    stop: bool


def together(tick: Tick) -> Tick:
    """Returns the tick of all processes.

    Args:
        tick: of this process; the events of process 0 count.

    Returns:
        Process 0's events, the versions that every process has fetched, and whether
        any process is to end.

    Raises:
        ProcessesError: a process does not answer.

    >>> together(Tick((None,), (("a1", 0),), stop=False))
    Tick(events=(None,), fetched=(('a1', 0),), stop=False)
    """
    told = {
        "events": "" if processes.index() else _written(tick.events),
        "fetched": tick.fetched,
        "stop": tick.stop,
    }
    everyone = processes.exchange("tick", told)
    first = everyone[0]
    fetched = [
        (digest, attempt)
        for digest, attempt in first["fetched"]
        if all([digest, attempt] in map(list, each["fetched"]) for each in everyone)
    ]
    return Tick(
        _read(first["events"]), tuple(fetched), any(each["stop"] for each in everyone)
    )


def _written(events: tuple[Event, ...]) -> str:
    value = [
        None
        if event is None
        else {"orders": wire.write_orders([(0, event)])}
        if isinstance(event, Grant | Revoke)
        else {"wanted": [list(policy) for policy in event]}
        for event in events
    ]
    return base64.b64encode(wire.pack(value)).decode("ascii")


def _read(text: str) -> tuple[Event, ...]:
    return tuple(map(_event, wire.unpack(base64.b64decode(text))))


def _event(value: Any) -> Event:
    if value is None:
        return None
    if "wanted" in value:
        return tuple(PolicyVersion(*each) for each in value["wanted"])
    [(_, order)] = wire.read_orders(value["orders"])
    return order
