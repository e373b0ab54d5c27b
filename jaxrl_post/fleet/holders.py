"""The broker of a relay: where a sampler gets a payload from.

The trainer sends each payload to a few samplers, and these send it to all others. So
the bytes that leave the trainer do not grow with the number of samplers.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

__all__ = ["Answer", "Holders", "Refer", "Send", "Wait"]

# A member that asks is referred to so many, in case some are gone.
_MOST_REFERRED = 3


@dataclass(frozen=True)
class Send:
    """The trainer sends the payload itself, now."""


@dataclass(frozen=True)
class Refer:
    """These members have the payload; the first has been named least often."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """These members are fetching the payload; ask again soon.

    A member that waited long enough for them asks with them as failed.
    """

    members: tuple[str, ...]


@dataclass
class _Spread:
    """The members that fetch and hold a payload, and how often the trainer sent it.

    The members are keys of dictionaries, which keep their order, so that the same
    calls give the same answers in every process.
    """

    sent: int = 0
    fetching: dict[str, None] = field(default_factory=dict)
    holders: dict[str, None] = field(default_factory=dict)

    def remove(self, member: str) -> None:
        """Forgets a member."""
        self.fetching.pop(member, None)
        self.holders.pop(member, None)


type Answer = Send | Refer | Wait


class Holders:
    """Decides who sends a payload to whom; does nothing itself, and has no clock.

    The trainer sends a payload to the first `copies` members that ask, and then again
    only where no member can. No member waits for ever: an answer `Wait` or `Refer`
    names members, and who asks with all of them as failed is sent the payload.

    A member that returns after it left has another name than before.

    Args:
        copies: number of times that the trainer sends a payload if nothing fails;
            bytes out of the trainer are at most so many times the version's.

    Attributes:
        sends: number of answers `Send`.
        extra_sends: number of these above `copies` for their payload.

    >>> holders = Holders(copies=1)
    >>> holders.ask("key", "a"), holders.ask("key", "b")
    (Send(), Wait(members=('a',)))
    >>> holders.has("a", ["key"])
    >>> holders.ask("key", "b"), holders.ask("key", "b", failed=["a"])
    (Refer(members=('a',)), Send())
    >>> holders.sends, holders.extra_sends
    (2, 1)
    """

    def __init__(self, copies: int = 2) -> None:
        if copies < 1:
            raise ValueError(f"copies must be at least 1, got {copies}")
        self.sends = 0
        self.extra_sends = 0
        self._copies = copies
        self._spreads: dict[str, _Spread] = {}
        # How often each member was named first.
        self._referred = Counter[str]()

    def ask(self, key: str, member: str, failed: Collection[str] = ()) -> Answer:
        """Returns where a member gets a payload from.

        Args:
            key: digest of the payload.
            member: who asks. If it was sent the payload before, that failed.
            failed: members that did not send it the payload, or not in time.
        """
        spread = self._spreads.setdefault(key, _Spread())
        spread.remove(member)
        if spread.sent < self._copies:
            return self._send(spread, member)
        if able := [each for each in spread.holders if each not in failed]:
            able = sorted(able, key=self._referred.__getitem__)[:_MOST_REFERRED]
            self._referred[able[0]] += 1
            return Refer(tuple(able))
        if soon := [each for each in spread.fetching if each not in failed]:
            return Wait(tuple(soon))
        self.extra_sends += 1
        return self._send(spread, member)

    def has(self, member: str, keys: Iterable[str]) -> None:
        """Notes that a member holds payloads, and sends them to others."""
        for key in keys:
            spread = self._spreads.setdefault(key, _Spread())
            spread.remove(member)
            spread.holders[member] = None

    def leave(self, member: str) -> None:
        """Forgets a member: it is gone, or silent past its lease."""
        del self._referred[member]
        for spread in self._spreads.values():
            spread.remove(member)

    def forget(self, keys: Iterable[str]) -> None:
        """Forgets payloads that no version has any more."""
        for key in keys:
            self._spreads.pop(key, None)

    def _send(self, spread: _Spread, member: str) -> Send:
        self.sends += 1
        spread.sent += 1
        spread.fetching[member] = None
        return Send()
