"""Runs whose samples are drawn ahead of their step, in turns or while steps train."""

import dataclasses
import functools
import io
import itertools
import threading
from pathlib import Path

import jax
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig
from jaxrl_post.learner import model
from jaxrl_post.learner.updater import Updater
from jaxrl_post.programs import online
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.metric_table import UNSTEADY
from jaxrl_post.records.timeline import read_timeline
from jaxrl_post.sharding import MeshError, create_mesh
from tests.programs.test_judge import made
from tests.programs.trainers import CONFIG, RL, make_model
from tests.tiers import daily

STEPS = 5
# Seconds, and what depends on them; the probe, which runs in turns do not have.
TIMED = (*UNSTEADY, "idle/", "publish/", "sampler/", "mismatch/probe")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> RLConfig:
    """A run of five steps on one device; its samples are exact."""
    made, folder = make_model(), tmp_path_factory.mktemp("ahead")
    pretrained.save(folder / "model", CONFIG, made.params, tokenizer=made.tokenizer)
    return dataclasses.replace(
        RL,
        model=str(folder / "model"),
        mesh="dp2",
        exact=True,
        steps=STEPS,
        eval=EvalConfig(num_tasks=4, every=2),
        checkpoint=CheckpointConfig(every=2, keep=9),
    )


def run(config: RLConfig, folder: Path, *, ahead: int, stop=lambda: False, **options):
    rollout = dataclasses.replace(config.rollout, ahead=ahead)
    config = dataclasses.replace(
        config, rollout=rollout, run_dir=str(folder), **options
    )
    console = Console(file=io.StringIO(), width=200)
    return online.run_rl(config, console=console, command="", should_stop=stop)


def weights(folder: Path) -> dict[str, bytes]:
    found = load_file(folder / "model/model.safetensors")
    return {name: array.tobytes() for name, array in found.items()}


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = read_rows(RunDirectory(folder).metrics)
    return [
        {
            name: value
            for name, value in row["metrics"].items()
            if not name.startswith(TIMED)
        }
        for row in rows
    ]


def check_timeline(folder: Path, *, ahead: int, processes: int = 1) -> None:
    """Each prompt is drawn, sampled and trained on once, by the version of its step."""
    rows = [*read_timeline(RunDirectory(folder).timeline)]

    def told(event: str, name: str, work: str | None = None) -> list:
        chosen = (r for r in rows if r["event"] == event and r.get("work") == work)
        return [row[name] for row in chosen]

    steps, prompts = [*range(1, STEPS + 1)], [*range(4 * STEPS)]
    assert [*itertools.chain(*told("draw", "prompts"))] == prompts
    assert sorted(told("finish", "prompt")) == prompts
    assert [*itertools.chain(*told("take", "prompts"))] == prompts
    assert told("take", "step") == steps
    assert told("take", "version") == [step - 1 for step in steps]
    sampled = [max(0, step - 1 - ahead) for step in steps]
    assert told("take", "versions") == [[[v, v]] * 4 for v in sampled]
    for event in ("begin", "end"):
        assert told(event, "step", "update") == steps
        assert told(event, "step", "evaluate") == [0, 2, 4, 5]
        assert told(event, "step", "sample") == steps
        assert told(event, "version", "sample") == sampled
    order = [(row["event"], row.get("work"), row.get("step")) for row in rows]
    for step in steps:
        end, take = order.index(("end", "sample", step)), ("take", None, step)
        assert end < order.index(take) < order.index(("begin", "update", step))
    assert {"publish", "save"} < {row["event"] for row in rows}
    assert len(told("start", "at")) == processes


@pytest.fixture(scope="module")
def in_turns(base, coin, tmp_path_factory):
    """Weights and metrics of the run on the trainer's devices alone, by `ahead`."""

    @functools.cache
    def outcome(ahead: int):
        folder = tmp_path_factory.mktemp("turns") / "run"
        two = functools.partial(create_mesh, devices=jax.devices()[:2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "create_mesh", two)
            run(base, folder, ahead=ahead)
        if ahead:
            check_timeline(folder, ahead=ahead)
        else:
            assert not RunDirectory(folder).timeline.exists()
        return weights(folder), metrics(folder)

    return outcome


@pytest.fixture(scope="module")
def likes(tmp_path_factory) -> str:
    """The directory of a reward model."""
    return str(made(tmp_path_factory.mktemp("likes") / "model", "value"))


@pytest.mark.meshes
# test_judge.py, and the runs of other numbers of samplers, guard its parts.
@pytest.mark.parametrize("samplers", daily([0, 2], ()))
def test_a_reward_model_judges_on_its_own_devices(
    base, coin, likes, tmp_path, samplers
):
    """While the trainer's devices train; the run is the one that judges in turns."""
    base = dataclasses.replace(base, steps=3, eval=EvalConfig(num_tasks=2, every=2))
    judge = RewardModelConfig(likes, batch_tokens=64)
    two = functools.partial(create_mesh, devices=jax.devices()[:2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "create_mesh", two)
        run(base, tmp_path / "turns", ahead=1, reward=judge)
    apart = dataclasses.replace(judge, mesh="dp2")
    run(base, tmp_path / "apart", ahead=1, samplers=samplers, reward=apart)
    assert weights(tmp_path / "apart") == weights(tmp_path / "turns")
    found, expected = metrics(tmp_path / "apart"), metrics(tmp_path / "turns")
    assert found == expected
    assert all("reward/model" in row for row in found[1:])


@pytest.mark.slow("trains whole runs in turns and with samplers of their own")
@pytest.mark.meshes
@pytest.mark.parametrize(
    ("ahead", "samplers"),
    daily(itertools.product([0, 1, 3], [1, 2, 3]), {(3, 2)}),
)
def test_a_run_is_the_same_on_any_number_of_samplers(
    base, in_turns, tmp_path, ahead, samplers
):
    run(base, tmp_path / "run", ahead=ahead, samplers=samplers)
    expected = in_turns(ahead)
    assert (weights(tmp_path / "run"), metrics(tmp_path / "run")) == expected
    check_timeline(tmp_path / "run", ahead=ahead)
    _, *rows = read_rows(RunDirectory(tmp_path / "run").metrics)
    assert {row["metrics"].get("mismatch/probe") for row in rows} == {0.0}


@pytest.mark.meshes
@pytest.mark.parametrize("stop", daily(range(1, STEPS), {1}))
def test_a_run_goes_on_as_if_it_had_not_stopped(base, in_turns, tmp_path, stop):
    """With another number of samplers, which had batches that no step had taken."""
    # It is asked after each step, and after the evaluation of step 2.
    left = iter([False] * (stop - 1 + (stop > 2)) + [True])
    first = run(
        base, tmp_path / "run", ahead=1, samplers=2, stop=lambda: next(left, True)
    )
    assert (first.step, first.completed) == (stop, False)
    assert run(base, tmp_path / "run", ahead=1, samplers=1).completed
    assert (weights(tmp_path / "run"), metrics(tmp_path / "run")) == in_turns(1)
    check_timeline(tmp_path / "run", ahead=1, processes=2)


@pytest.mark.meshes
def test_a_crash_beside_samplers_leaves_the_last_checkpoint(
    base, in_turns, tmp_path, monkeypatch
):
    real = Updater.update

    def broken(updater: Updater, batch, number: int):
        if number == 4:
            raise OSError("the machine is gone")
        return real(updater, batch, number)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "update", broken)
        with pytest.raises(OSError, match="gone"):
            run(base, tmp_path / "run", ahead=3, samplers=2)
    # The thread ended with the run.
    assert not [each for each in threading.enumerate() if "samplers" in each.name]
    # Step 3 and a part of step 4 are taken again: their rows are not kept.
    with RunDirectory(tmp_path / "run").timeline.open("ab") as timeline:
        timeline.write(b'{"time": 17')
    run(base, tmp_path / "run", ahead=3, samplers=1)
    assert (weights(tmp_path / "run"), metrics(tmp_path / "run")) == in_turns(3)
    check_timeline(tmp_path / "run", ahead=3, processes=2)


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samplers": 8}, r"8 x --rollout.mesh dp1 leave no device of 8 for"),
        (
            {"samplers": 7},
            r"--mesh: 'dp2' needs 2 devices.* Of 8 devices 7 are for 7 x",
        ),
        ({"samplers": 1, "mesh": "tp5"}, r"--mesh"),
        (
            {"samplers": 4, "reward": RewardModelConfig("MODEL", mesh="tp2,dp2")},
            r"1 x --reward.mesh tp2,dp2 and 4 x --rollout.mesh dp1 leave no device",
        ),
        (
            {"reward": RewardModelConfig("MODEL", mesh="dp-1")},
            r"--reward.mesh: has no -1 here",
        ),
        (
            {"samplers": 1, "reward": RewardModelConfig("MODEL", mesh="tp5")},
            r"--reward.mesh: .*5",
        ),
    ],
)
def test_devices_that_do_not_suffice_are_named(
    base, coin, likes, tmp_path, options, message
):
    if "reward" in options:
        reward = dataclasses.replace(options["reward"], model=likes)
        options = options | {"reward": reward}
    with pytest.raises(MeshError, match=message):
        run(base, tmp_path / "run", ahead=0, **options)


@pytest.mark.meshes
# test_partial.py guards the same without samplers of their own.
@pytest.mark.parametrize("kept", daily([True, False], ()))
def test_unfinished_groups_go_on_under_the_next_parameters(base, coin, tmp_path, kept):
    """No step waits for them; each is trained on once, however often a run stops."""
    rollout = dataclasses.replace(
        base.rollout, partial=3, recompute_cache=not kept, max_tokens=12
    )
    base = dataclasses.replace(base, rollout=rollout, exact=not kept, steps=8)
    left = iter([False] * 3 + [True])
    folder = tmp_path / "run"
    run(base, folder, ahead=1, samplers=2, stop=lambda: next(left, True))
    assert run(base, folder, ahead=1, samplers=1).completed
    taken = [
        row["prompts"]
        for row in read_timeline(folder / "timeline.jsonl")
        if row["event"] == "take"
    ]
    groups = [prompt for prompts in taken for prompt in prompts]
    assert len(taken) == 8
    assert len(groups) == len({*groups}) == 8 * base.rollout.prompts_per_step
    # A group waits for three others at most, and so is trained on within two steps.
    late = [prompt // 4 - step for step, each in enumerate(taken) for prompt in each]
    assert max(late) <= 1
    ages = [row.get("rollout/staleness") for row in metrics(folder)[1:]]
    assert max(age for age in ages if age is not None) >= 1.0
