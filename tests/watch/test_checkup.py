"""The doctor before a run: clean commands pass, and each fault has a line."""

import dataclasses
import io

import pytest
from rich.console import Console

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.horizon import with_horizons
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.run import WarmStartConfig
from jaxrl_post.programs.watching import checkup
from jaxrl_post.programs.watching.checkup import run_checkup
from jaxrl_post.programs.watching.doctor import UnhealthyError
from jaxrl_post.programs.watching.traps import TRAPS
from launch import doctor
from tests.programs.conftest import coin as coin
from tests.programs.trainers import RL
from tests.watch.test_doctor import base as base
from tests.watch.test_doctor import broken as broken
from tests.watch.test_doctor import model as model


def checked(config) -> tuple[str, list[str]]:
    """The output, and the names of the checks that failed."""
    out, failed = io.StringIO(), []
    try:
        run_checkup(config, console=Console(file=out, width=300))
    except UnhealthyError as error:
        failed = str(error).removeprefix("before the run: ").split(", ")
    return out.getvalue(), failed


def rl(model, **changes):
    rollout = dataclasses.replace(RL.rollout, **changes.pop("rollout", {}))
    return dataclasses.replace(RL, model=model, rollout=rollout, log=(), **changes)


def test_a_command_of_prime_passes(model, tmp_path):
    algorithm = dataclasses.replace(RL.algorithm, name="prime")
    config = rl(model, run_dir=str(tmp_path / "run"), algorithm=algorithm)
    out, failed = checked(config)
    assert failed == []
    assert "ok   a small step" in out


WSD = OptimizerConfig(schedule="wsd", final_ratio=0.1, warmup_ratio=0.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"dynamic_sampling": True, "max_draws": 8}},
        {"rollout": {"dynamic_sampling": True, "group_reward_low": 0.2}},
        {"rollout": {"partial": 4, "staleness": 3, "reward_grace_s": 3.0}},
        {"rollout": {"partial": 4, "recompute_cache": False}},
        {"optimizer": WSD},
        {"critic": CriticConfig(optimizer=WSD, warmup_steps=9)},
        {"prm": PrmConfig(optimizer=WSD)},
    ],
)
def test_options_that_need_a_longer_run_are_no_matter_to_a_small_step(
    changes, tmp_path
):
    small = checkup._small(rl("tiny", **changes), tmp_path)
    check_options(small)
    with_horizons(small, None)


def test_a_command_without_a_fault_passes(model, tmp_path):
    out, failed = checked(rl(model, run_dir=str(tmp_path / "run")))
    assert failed == []
    for name in (
        "cores", "disk", "rewards of demonstrations", "a judgement", "a small step",
        "tokenizer and embeddings", "round trip of prompts", "sampler and trainer",
        "tokens, masks and advantages of the batch", "gradient of a single token",
        "lengths",
    ):  # fmt: skip
        assert f"ok   {name}: " in out, name
    assert "ok   memory: 0." in out
    assert "a sample: context, {=between answers" in out
    [shown] = [line for line in out.splitlines() if line.startswith("train ")][:1]
    assert shown.count("{+") == 1
    assert not (tmp_path / "run").exists()


def test_a_reference_is_looked_at(model):
    algorithm = dataclasses.replace(RL.algorithm, kl_coefficient=0.1)
    out, failed = checked(rl(model, algorithm=algorithm))
    assert failed == []
    assert "ok   reference: stays as it is" in out


def test_programs_on_data_sets_take_a_step(base):
    out, failed = checked(base)
    assert failed == []
    assert "ok   a small step" in out


@pytest.mark.parametrize(
    ("trap", "names"),
    [
        ("log-prob-mismatch", {"a small step", "mismatch"}),
        (
            "advantage-off-by-one",
            {"advantage-misplaced", "gradient of a single token"},
        ),
    ],
)
def test_a_fault_of_the_step_fails(model, monkeypatch, trap, names):
    mismatch = dataclasses.replace(RL.mismatch, warn=1.0001, stop=1.01)

    run_rl = checkup.run_rl

    def planted(config, *, prepare, **options):
        def both(trainer):
            TRAPS[trap].plant(trainer)
            prepare(trainer)

        return run_rl(config, prepare=both, **options)

    monkeypatch.setattr(checkup, "run_rl", planted)
    _, failed = checked(rl(model, mismatch=mismatch))
    assert names <= set(failed)


def test_memory_that_is_too_small_is_told_before_anything_is_allocated(
    base, model, monkeypatch
):
    # A machine with 1 MiB, and one that the step fits and the run does not.
    monkeypatch.setattr(checkup, "free_memory", lambda: 2**20)
    for config in (base, rl(model)):
        out, failed = checked(config)
        assert failed == ["memory; no step was tried"]
        assert "fail memory: " in out
        assert " too much: " in out
    monkeypatch.setattr(checkup, "free_memory", lambda: 100 * 2**20)
    large = {"prompts_per_step": 4096, "samples_per_prompt": 32}
    out, failed = checked(rl(model, rollout=large))
    assert failed == ["memory"]
    assert "For less of KV cache: fewer --rollout.num-slots" in out
    assert "ok   a small step" in out


def test_lengths_beyond_the_limits_warn(model):
    out, failed = checked(rl(model, rollout={"max_tokens": 1}))
    assert failed == []
    assert "warn lengths: " in out
    assert "demonstrations are longer" in out


def test_a_conversation_with_tools_is_shown_where_the_model_calls_none(model):
    out, failed = checked(
        rl("tiny", env="lookup", rollout={"max_prompt_tokens": 200, "max_turns": 3})
    )
    assert failed == []
    *_, shown = out.partition("as if the model had said the assistant's turns")
    assert shown.count("{+<tool_call>") >= 1
    assert shown.count("{=<tool_response>") >= 1


def test_a_grader_that_raises_fails(model, broken):
    with pytest.raises(RuntimeError):
        checked(rl(model, env="broken_coins:Raises"))


def test_answers_that_are_cut_warn_but_not_before_a_warm_start(model):
    out, failed = checked(rl(model, rollout={"max_tokens": 1}))
    assert failed == []
    assert "warn stop tokens: " in out
    warm = WarmStartConfig(steps=5)
    out, _ = checked(rl("tiny", rollout={"max_tokens": 1}, warm_start=warm))
    assert "before the warm start" in out


def test_options_that_the_run_refuses_are_refused(model, capsys):
    with pytest.raises(ConfigError):
        checked(rl(model, env="no-such-environment"))
    assert doctor.main(["grpo", "--mesh", "xx4"]) == 1
    assert "--mesh" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        doctor.main(["sft", "--help", "epochs"])
    assert ended.value.code == 0
    assert "--epochs" in capsys.readouterr().out
