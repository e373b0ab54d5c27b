"""The shares of samplers, and the samples that one takes over from another.

Nothing here decides whether a sample ends, only how soon all do. The samples of a
prompt stay with one sampler, which holds the prompt's keys, as long as it has room.
"""

import itertools
import math
from collections.abc import Collection, Mapping

from jaxrl_post.fleet.ledger import Member, Queue, Sample, Work

__all__ = ["late", "share"]

# A sampler that is slower than this share of another one's pace is relieved by it.
SLOW = 0.5
# Seconds for which a share of some work is kept for samplers that are about to have its
# policy, from the moment at which the first one asked for some.
KEPT_S = 5.0


def share(
    member: Member, members: Mapping[int, Member], work: Work, queue: Queue, now: float
) -> list[Sample]:
    """Returns the waiting samples of some work that a sampler should draw.

    It draws prompts up to its part of all samples, by its speed. What is left over is
    for the sampler that will have the fewest samples for its speed.

    Args:
        member: has room, and is ready for the work.
        members: all samplers, by epoch.
        work: the work.
        queue: of the work.
        now: the time.
    """
    queue.since = min(queue.since, now)
    early = now < queue.since + KEPT_S
    able = [e for e in members.values() if e is member or _draws(e, work, early)]
    speed, total = _speeds(able, now), queue.count + sum(e.running for e in able)
    part = total * speed[member] / sum(speed.values())
    chosen, running, most = list[Sample](), member.running, member.room
    for home, waiting in queue.prompts(
        lambda home: _place(home, member, members, work)
    ):
        size = min(len(waiting), most - len(chosen))
        mine = home == member.epoch and running < member.slots
        if not (mine or running + size <= part) and any(
            (each.running + size) / speed[each] < (running + size) / speed[member]
            for each in able
            if each is not member
        ):
            # The other one will ask.
            break
        taken = itertools.islice(waiting, size)
        chosen += sorted(taken, key=lambda sample: sample.index)
        running = member.running + len(chosen)
        if len(chosen) == most:
            break
    return chosen


def late(idle: Member, members: Mapping[int, Member], now: float) -> list[Sample]:
    """Returns samples of another sampler that would end sooner at one with free slots.

    Args:
        idle: the sampler with free slots.
        members: all samplers, by epoch.
        now: the time.
    """
    if idle.free <= 0:
        return []
    usual = _usual(members.values(), now)
    found = (
        _later(each, idle, now, usual) for each in members.values() if each is not idle
    )
    return max(found, key=len, default=[])[: idle.free]


def _later(member: Member, idle: Member, now: float, usual: float) -> list[Sample]:
    work = member.work
    if work is None or not idle.can(work):
        return []
    newest = list(member.samples.values())[::-1]
    pace, other = member.pace(now, usual), idle.pace(now, usual)
    if pace < SLOW * other:
        # At each move the other one must be faster by more, so that moves end.
        moved = [each for each in newest if pace < SLOW ** (1 + each.moves) * other]
        return sorted(moved, key=lambda sample: sample.begun)
    if other < SLOW * pace:
        return []
    # More than it has slots for: these wait there.
    fresh = [each for each in newest if not (each.begun or each.moves)]
    return fresh[: max(0, -member.free)]


def _draws(member: Member, work: Work, early: bool) -> bool:
    """Whether a sampler could be given some work, or soon if it sampled before."""
    digest = work.policy.digest
    return (
        member.fits(work)
        and digest not in member.refused
        and (digest in member.ready or (early and member.measured))
    )


def _place(
    home: int, member: Member, members: Mapping[int, Member], work: Work
) -> int | None:
    """Place of prompts by the sampler that drew them last, from 0; None for none."""
    if home == member.epoch:
        return 0
    if not home:
        return 2
    other = members.get(home)
    if other is None or not other.can(work):
        return 1
    return None if other.free > 0 else 3


def _speeds(members: Collection[Member], now: float) -> dict[Member, float]:
    """Tokens a second of all slots of each sampler."""
    usual = _usual(members, now)
    return {each: each.slots * max(each.pace(now, usual), 1e-9) for each in members}


def _usual(members: Collection[Member], now: float) -> float:
    """The mean pace of the samplers; 1 before any was measured."""
    paces = [each.pace(now) for each in members if each.measured]
    return math.fsum(paces) / len(paces) if paces else 1.0
