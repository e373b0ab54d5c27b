"""Samplers in other processes may die at any time: the run stays the same."""

import pytest

from tests.e2e.fleets import COMMON, Aim, Fleet, Known, alone, grants, result_of
from tests.e2e.gates import Seen

# Prompt ids of evaluations.
EVAL_IDS = 2**31


def options(steps: int, ahead: int) -> tuple[str, ...]:
    return (*COMMON, f"--steps={steps}", f"--rollout.ahead={ahead}")


# Messages that pass.


def asks(path: str):
    return lambda seen, known: seen.path == path and not seen.status


def is_told(path: str):
    return lambda seen, known: seen.path == path and seen.status == 200


def is_sent(seen: Seen) -> bool:
    """Whether a payload, or who has it."""
    return seen.path.startswith("/weights/payloads/") and seen.status in (200, 303)


def progress(seen: Seen) -> list:
    if seen.path != "/fleet/news" or seen.status:
        return []
    return seen.asked["news"]["progress"]


def is_newly_ready(seen: Seen, known: Known) -> bool:
    if seen.path != "/fleet/news" or seen.status:
        return False
    return bool(seen.asked["news"]["ready"]) and not known.ready


def evaluates(seen: Seen, known: Known) -> bool:
    return any(each["prompt_id"] >= EVAL_IDS for each in grants(seen))


def writes(fleet: Fleet) -> bool:
    return any("tmp" in each.name for each in (fleet.run / "checkpoints").glob("*"))


JOINING = (
    Aim("compiling", is_told("/fleet/welcome"), before="kill", within_s=3.0),
    Aim("asking to join", asks("/fleet/join"), before="kill"),
    Aim("joined, and not told", is_told("/fleet/join"), before="kill"),
    Aim(
        "fetching a version whole",
        lambda seen, known: is_sent(seen) and not known.staged,
        before="kill",
    ),
    Aim("ready for the first time", is_newly_ready, before="kill"),
    Aim(
        "before its first grant",
        lambda seen, known: bool(grants(seen)) and not known.grants,
        before="kill",
    ),
    Aim(
        "joined again",
        lambda seen, known: is_told("/fleet/join")(seen, known) and known.joins > 0,
        before="stop",
        within_s=0.3,
    ),
)
FETCHING = (
    Aim("fetching deltas", lambda seen, known: is_sent(seen) and known.staged > 0),
    Aim("staged", asks("/weights/held")),
    Aim("at the probe", is_told("/weights/held"), within_s=0.2),
)
SAMPLING = (
    Aim("in a burst", lambda seen, known: bool(grants(seen)), within_s=0.1),
    Aim("granted, and not told", lambda seen, known: bool(grants(seen))),
    Aim(
        "between a burst and its news",
        lambda seen, known: any(not p["finish_reason"] for p in progress(seen)),
    ),
    Aim(
        "told its news",
        lambda seen, known: any(not p["finish_reason"] for p in progress(seen)),
        then="pass",
    ),
    Aim(
        "at a switch",
        lambda seen, known: any(
            each["version"] > known.version >= 0 for each in grants(seen)
        ),
    ),
    Aim("all at once", lambda seen, known: bool(progress(seen)), whom="all"),
)
RELAYING = (
    Aim(
        "relaying",
        lambda seen, known: seen.status == 303 and bool(seen.answer["ask"]),
        whom="holder",
        then="pass",
        before="kill",
    ),
)
SILENT = (
    Aim("in a burst", lambda seen, known: bool(progress(seen)), how="stop"),
    Aim(
        "its news are late",
        lambda seen, known: bool(progress(seen)),
        how="stop",
        then="late",
    ),
    Aim(
        "fetching deltas",
        lambda seen, known: is_sent(seen) and known.staged > 0,
        how="stop",
        then="pass",
    ),
    Aim("at the probe", is_told("/weights/held"), how="stop", within_s=0.2),
    Aim("in a burst", lambda seen, known: bool(progress(seen)), how="cut"),
    Aim(
        "fetching deltas",
        lambda seen, known: is_sent(seen) and known.staged > 0,
        how="cut",
    ),
)
TRAINER = (
    Aim(
        "publishing",
        lambda seen, known: seen.path.endswith("/manifest") and not seen.status,
        whom="trainer",
    ),
    Aim("sending a version", lambda seen, known: is_sent(seen), whom="trainer"),
    Aim("granting", lambda seen, known: bool(grants(seen)), whom="trainer"),
    Aim("sampled for", lambda seen, known: bool(progress(seen)), whom="trainer"),
    Aim(
        "training",
        lambda seen, known: any(each["finish_reason"] for each in progress(seen)),
        whom="trainer",
        then="pass",
        within_s=0.5,
    ),
    Aim("evaluating", evaluates, whom="trainer", within_s=0.1),
    Aim("writing a checkpoint", when=writes, whom="trainer"),
    Aim(
        "resuming",
        when=lambda fleet: "opening model" in fleet.trainer.output,
        whom="trainer",
        before="trainer",
        within_s=3.0,
    ),
    Aim("joined anew", is_told("/fleet/join"), whom="trainer", before="trainer"),
    Aim(
        "sampled for",
        lambda seen, known: bool(progress(seen)),
        whom="trainer",
        how="stop",
    ),
)


def assert_same(fleet: Fleet, whole) -> None:
    found = result_of(fleet.run)
    assert found.steps == whole.steps
    drawn = [
        (step, row["prompt_id"], row["sample_index"])
        for step, rows in found.trained.items()
        for row in rows
    ]
    assert len({*drawn}) == len(drawn), "a sample was trained on twice"
    assert [*found.trained] == [*whole.trained]
    for step, rows in whole.trained.items():
        assert found.trained[step] == rows, step
    assert found.weights == whole.weights


# tests/fleet/test_sockets.py and test_network.py guard the same.
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("starts a trainer twice and samplers again and again")
def test_kills_in_every_phase_change_nothing(program, tmp_path, record_property):
    aims = [
        JOINING[3],
        FETCHING[0],
        SAMPLING[1],
        SAMPLING[2],
        SILENT[4],
        TRAINER[3],
        SAMPLING[5],
        TRAINER[6],
        SAMPLING[3],
        SILENT[0],
    ]
    steps, ahead = 16, 1
    fleet = Fleet(program, tmp_path / "run", options(steps, ahead), 2)
    try:
        fleet.settle()
        for aim in aims:
            fleet.disturb(aim)
        fleet.settle()
        fleet.finish()
    finally:
        fleet.close()
    record_property("disturbances", fleet.made)
    whole = alone(program, tmp_path / "whole", options(steps, ahead))
    assert_same(fleet, whole)
