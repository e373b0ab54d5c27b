"""Conditions to begin and to continue a run."""

import dataclasses
import importlib
import io
import json
import logging
import re
import types
from pathlib import Path
from typing import Any, cast

import jax
import pytest
from rich.console import Console

from jaxrl_post import models, pretrained
from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import fields_of
from jaxrl_post.config.offline import PairsConfig, PreferenceConfig, SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.reward_model import PrmConfig, RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import CheckpointConfig, EvalConfig, WarmStartConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.programs import loop, memory, offline, online, run
from jaxrl_post.records.directory import RunDescription, RunDirectory, read_rows
from jaxrl_post.records.lock import run_lock
from tests.programs.trainers import CONFIG, RL, changed


@pytest.fixture(autouse=True)
def _coin(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "e2e"))
    importlib.import_module("coin")


def memory_options() -> list[str]:
    text = " ".join(memory.REMEDIES.values())
    return sorted(set(re.findall(r"--[a-z][\w.-]+", text)))


def begin(config: RLConfig | SFTConfig) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200)
    start = online.run_rl if isinstance(config, RLConfig) else offline.run_offline
    start(config, console=console, command="")
    return out.getvalue()


def described(path: Path, config) -> RunDirectory:
    directory = RunDirectory(path)
    directory.describe(
        RunDescription("", "demo", 0, "", {"jax": "0"}, dataclasses.asdict(config))
    )
    return directory


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (dataclasses.replace(RL, seed=1), "seed: 0 then, 1 now"),
        (changed("rollout", max_tokens=3), r"rollout.max_tokens: 4 then, 3 now"),
        (
            changed("rollout", stop_strings=("x",)),
            r"stop_strings: \[\] then, \['x'\] now",
        ),
        (changed("algorithm", name="dapo"), "algorithm.name: 'grpo' then, 'dapo' now"),
        (
            changed("optimizer", learning_rate=1.0),
            "optimizer.learning_rate: 0.003 then",
        ),
        (dataclasses.replace(RL, dtype="bfloat16"), "dtype: None then, 'bfloat16' now"),
        (
            changed("critic", optimizer=OptimizerConfig(schedule="linear")),
            "critic.optimizer.schedule: 'constant' then, 'linear' now",
        ),
    ],
)
def test_what_changes_the_training_is_refused_by_name(tmp_path, now, message):
    directory = described(tmp_path / "run", RL)
    with pytest.raises(
        ConfigError,
        match=rf"--run-dir: .*run holds a run with another configuration; .*{message}",
    ):
        run.check_same_run(directory, now)


@pytest.mark.parametrize(
    "now",
    [
        dataclasses.replace(RL, mesh="fsdp4,tp2", steps=999, run_dir="elsewhere"),
        changed("eval", every=1, num_tasks=1),
        changed("checkpoint", every=1, keep=9),
        changed("update", microbatch_tokens=24, remat="full"),
        changed("rollout", reward_workers=4, deadline_s=1.0, max_failed_share=0.5),
    ],
)
def test_what_does_not_change_the_training_is_free(tmp_path, now):
    run.check_same_run(described(tmp_path / "run", RL), now)


def test_steps_beyond_a_schedule_are_refused_before_the_model_is_opened(tmp_path):
    linear = changed("optimizer", schedule="linear")
    linear = dataclasses.replace(
        linear, run_dir=str(tmp_path / "run"), model=str(tmp_path), steps=300
    )
    described(tmp_path / "run", dataclasses.replace(linear, steps=200))
    with pytest.raises(
        ConfigError,
        match=rf"--steps: .* {tmp_path}/run reaches 0 at step 200.*"
        r"Give --optimizer.schedule-steps 300 .*, or another --run-dir",
    ):
        begin(linear)


def test_another_algorithm_is_named_before_the_end_of_a_schedule(tmp_path):
    linear = dataclasses.replace(
        changed("optimizer", schedule="linear"),
        run_dir=str(tmp_path / "run"),
        model=str(tmp_path),
    )
    # config.json has what a run measured; the option is given as 0.
    began = dataclasses.replace(linear, steps=200)
    described(tmp_path / "run", began)
    rollout = dataclasses.replace(linear.rollout, max_prompt_tokens=0)
    now = dataclasses.replace(
        linear,
        steps=300,
        rollout=rollout,
        algorithm=dataclasses.replace(linear.algorithm, name="dapo"),
    )
    with pytest.raises(
        ConfigError,
        match=r"another configuration; algorithm.name: 'grpo' then, 'dapo' now\. Give",
    ):
        begin(now)


@pytest.mark.parametrize("rows", [None, [0], [0, 1]])
def test_a_run_that_took_no_step_may_be_removed(tmp_path, rows):
    directory = described(tmp_path / "run", RL)
    if rows is not None:
        lines = (json.dumps({"step": step}) + "\n" for step in rows)
        directory.metrics.write_text("".join(lines))
    with pytest.raises(ConfigError) as refused:
        run.check_same_run(directory, dataclasses.replace(RL, seed=1))
    removable = "That run never took a step, so its directory may be removed"
    assert (removable in str(refused.value)) == (rows != [0, 1])


def test_no_resume_does_not_write_over_a_run(tmp_path):
    described(tmp_path / "run", RL)
    config = dataclasses.replace(RL, run_dir=str(tmp_path / "run"), resume=False)
    with pytest.raises(ConfigError, match=r"--no-resume: .*run holds a run already"):
        begin(config)


@pytest.mark.parametrize("config", [RL, SFTConfig(env="coin:Coin")])
def test_a_run_directory_in_use_is_refused_before_the_model_is_opened(tmp_path, config):
    folder = tmp_path / "run"
    config = dataclasses.replace(config, run_dir=str(folder), model="no/such/place")
    with (
        run_lock(folder, "python -m launch.ppo"),
        pytest.raises(
            ConfigError, match=r"run is in use by .*\(python -m launch.ppo\)"
        ),
    ):
        begin(config)
    with pytest.raises(ConfigError, match="--model: 'no/such/place' is neither"):
        begin(config)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(RL, steps=0), "--steps: must be at least 1; got 0"),
        (changed("update", epochs=0), "--update.epochs: must be at least 1; got 0"),
        (
            changed("rollout", samples_per_prompt=1),
            "--rollout.samples-per-prompt: .* 2",
        ),
        (
            changed("rollout", temperature=0.0),
            "--rollout.temperature: must be at least",
        ),
        (dataclasses.replace(RL, eval=EvalConfig(num_tasks=0)), "--eval.num-tasks"),
        (
            SFTConfig(checkpoint=CheckpointConfig(every=0)),
            "--checkpoint.every: must be at least 1; got 0",
        ),
        (
            dataclasses.replace(
                changed("algorithm", name="rloo", clip_low=0.1), env="none:None"
            ),
            "rloo does not read it",
        ),
    ],
)
def test_numbers_that_make_no_sense_leave_nothing_behind(tmp_path, config, message):
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=message):
        begin(dataclasses.replace(config, run_dir=str(folder)))
    assert not folder.exists()


def gsm8k(tmp_path: Path, text: str, **data) -> RLConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    return dataclasses.replace(
        changed("data", path=str(path), **data),
        env="gsm8k?instruction=",
        run_dir=str(tmp_path / "run"),
    )


ROWS = "".join(
    json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) + "\n" for i in range(40)
)


def test_exact_mode_says_what_a_named_kernel_does_not_compute(tmp_path):
    config = dataclasses.replace(
        gsm8k(tmp_path, ROWS), exact=True, kernels="pallas_tpu"
    )
    out = io.StringIO()
    # This machine has no TPU: the run ends where the kernel is chosen.
    with pytest.raises(ConfigError, match="--kernels: pallas_tpu runs on tpu"):
        online.run_rl(config, console=Console(file=out, width=300), command="")
    assert "--kernels pallas_tpu: with --exact it computes the gradients alone" in (
        out.getvalue()
    )


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_rows_is_an_empty_data_set(tmp_path, text):
    with pytest.raises(
        ValueError, match=r"rows.jsonl: empty data set, the file has no"
    ):
        begin(gsm8k(tmp_path, text))


def test_a_bad_row_stops_with_its_line(tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl:41: no field 'answer'"):
        begin(gsm8k(tmp_path, ROWS + '{"question": "2?"}\n'))


def test_skipped_rows_are_counted_and_shown_once(tmp_path):
    config = gsm8k(tmp_path, ROWS + '{"question": "2?"}\nnoise\n', on_bad_row="skip")
    out = io.StringIO()
    # It stops at the first check after the file was read, several times even.
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, max_prompt_tokens=1)
    )
    with pytest.raises(
        ConfigError, match=r"--rollout.max-prompt-tokens: all \d+ train"
    ):
        online.run_rl(config, console=Console(file=out, width=300), command="")
    text = out.getvalue()
    assert text.count("rows.jsonl: 40 rows read, 2 skipped") == 1
    assert "rows.jsonl:41: no field 'answer'" in text
    assert "rows.jsonl:42: not JSON" in text


def test_an_exhausted_memory_names_what_lowers_it(tmp_path, monkeypatch):
    def exhausted(*_: object, **__: object):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.\nmore"
        )

    monkeypatch.setattr(loop.Trainer, "step", exhausted)
    config = dataclasses.replace(
        changed("data", path=str(tmp_path / "rows.jsonl")),
        env="gsm8k?instruction=",
        run_dir=str(tmp_path / "run"),
    )
    (tmp_path / "rows.jsonl").write_text(ROWS)
    config = dataclasses.replace(
        config,
        rollout=RolloutConfig(prompts_per_step=4, samples_per_prompt=2, max_tokens=4),
    )
    with pytest.raises(memory.OutOfMemoryError) as caught:
        begin(config)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(
        "out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."
    )
    told = [line.split(" MiB a device: ") for line in rest[:-1]]
    sizes = [float(before.rpartition(" ")[2]) for before, _ in told]
    assert sizes == sorted(sizes, reverse=True)
    names = {before.strip().partition(",")[0]: after for before, after in told}
    assert set(names) == {
        "parameters", "optimizer", "KV cache", "gradients", "activations",
    }  # fmt: skip
    assert "--update.microbatch-tokens" in names["activations"]
    assert isinstance(caught.value, run.RUN_ERRORS)


def test_another_error_of_the_devices_stays_as_it_is():
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        memory.memory_errors([]),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
    with (
        pytest.raises(memory.OutOfMemoryError, match="while the model was opened"),
        memory.memory_errors([]),
    ):
        raise MemoryError


@pytest.mark.parametrize("option", memory_options())
def test_options_against_an_exhausted_memory_are_options(option):
    known = {each.replace("_", "-") for each, _, _ in fields_of(RLConfig())}
    assert option.removeprefix("--") in known


def chats(tmp_path: Path, count: int, **changes) -> SFTConfig:
    path = tmp_path / "chats.jsonl"
    rows = ({"prompt": f"{i}?", "completion": f"{i}!"} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SFTConfig(
        **{
            "run_dir": str(tmp_path / "run"),
            "data": DataConfig(str(path), str(path), on_overlap="allow"),
            "examples_per_step": 4,
            "max_tokens": 32,
            **changes,
        }
    )


def test_a_run_in_epochs_says_how_much_data_it_has(tmp_path):
    linear = OptimizerConfig(schedule="linear")
    out = begin(chats(tmp_path, 6, epochs=2.0, optimizer=linear))
    assert (
        "6 examples to train on, 6 held out; 1.5 steps an epoch, 2 epochs in 3" in out
    )
    assert "step 3/3  loss " in out
    directory = RunDirectory(tmp_path / "run")
    rows = {row["step"]: row["metrics"] for row in read_rows(directory.metrics)}
    assert [rows[step]["train/epoch"] for step in (1, 2, 3)] == [
        pytest.approx(share) for share in (2 / 3, 4 / 3, 2)
    ]
    saved = json.loads(directory.config.read_text())["config"]
    assert (saved["steps"], saved["optimizer"]["schedule_steps"]) == (3, 3)
    # The same command has nothing left to do, and more epochs are more steps.
    assert "the run is at step 3, and --steps is 3" in begin(
        chats(tmp_path, 6, epochs=2.0, optimizer=linear)
    )
    with pytest.raises(ConfigError, match=r"--steps: the linear schedule of the run"):
        begin(chats(tmp_path, 6, epochs=4.0, optimizer=linear))


@pytest.mark.parametrize(("steps", "warned"), [(30, False), (31, True)])
def test_many_passes_over_few_examples_are_told(tmp_path, caplog, steps, warned):
    config = SFTConfig(steps=steps)
    opened = types.SimpleNamespace(config=config, console=Console(file=io.StringIO()))
    with caplog.at_level(logging.WARNING):
        run.tell_run(cast(Any, opened), 6, 0, 4, "examples")
    assert ("--steps 31: trains 20.7 times on each of 6 examples" in caplog.text) == (
        warned
    )


def test_the_length_in_epochs_is_checked_with_the_data(tmp_path):
    ends = OptimizerConfig(schedule="linear", schedule_steps=2)
    with pytest.raises(ConfigError, match=r"schedule-steps: must be at least --steps"):
        begin(chats(tmp_path, 6, epochs=2.0, optimizer=ends))
    assert not list((tmp_path / "run").glob("config.json"))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (
            {"name": "distillation", "reference": "no/such/place"},
            "--algorithm.reference",
        ),
        ({"name": "ppo"}, "--critic.model"),
        ({"name": "prime"}, "--prm.model"),
        ({}, "--rollout.draft"),
    ],
)
def test_a_model_that_is_not_there_is_refused_before_a_warm_start(
    tmp_path, changes, option
):
    config = changed("algorithm", **changes)
    if option == "--critic.model":
        critic = dataclasses.replace(config.critic, model="no/such/place")
        config = dataclasses.replace(config, critic=critic)
    if option == "--prm.model":
        config = dataclasses.replace(config, prm=PrmConfig(model="no/such/place"))
    if option == "--rollout.draft":
        rollout = dataclasses.replace(config.rollout, draft="no/such/place", guesses=3)
        config = dataclasses.replace(config, rollout=rollout)
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    with pytest.raises(
        ConfigError, match=rf"{option}: no such directory: no/such/place"
    ):
        begin(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kernels", "platform"), [("pallas_tpu", "tpu"), ("pallas_gpu", "hopper")]
)
def test_kernels_of_another_platform_are_refused_before_anything_is_compiled(
    tmp_path, kernels, platform
):
    config = dataclasses.replace(RL, kernels=kernels, run_dir=str(tmp_path / "run"))
    message = f"--kernels: {kernels} runs on {platform}, and "
    with pytest.raises(ConfigError, match=message):
        begin(config)


WARM = dataclasses.replace(RL, warm_start=WarmStartConfig(steps=2, examples_per_step=4))


@pytest.fixture
def no_warm_start(monkeypatch):
    monkeypatch.setattr(
        online, "warm_started", lambda *args, **rest: pytest.fail("warm start")
    )


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        (50, 2000, "got 2000 with --rollout.max-prompt-tokens 50, which is 2050;"),
        (0, 100_000, "got 100000 with a prompt of 1, which is 100001; lower"),
    ],
)
@pytest.mark.usefixtures("no_warm_start")
def test_samples_beyond_the_context_are_refused_before_a_warm_start(
    tmp_path, prompt, completion, message
):
    rollout = dataclasses.replace(
        WARM.rollout, max_prompt_tokens=prompt, max_tokens=completion
    )
    config = dataclasses.replace(
        WARM,
        run_dir=str(tmp_path / "run"),
        rollout=rollout,
    )
    with pytest.raises(
        ConfigError,
        match="^--rollout.max-tokens: a prompt and its completion must have at most "
        f"1024 tokens, the model's context; {message}",
    ):
        begin(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_warm_start")
def test_a_prompt_for_which_no_room_is_left_blames_the_completion(tmp_path):
    rollout = dataclasses.replace(RL.rollout, max_prompt_tokens=0, max_tokens=1023)
    config = dataclasses.replace(
        WARM,
        run_dir=str(tmp_path / "run"),
        rollout=rollout,
    )
    with pytest.raises(
        ConfigError, match=r"^--rollout.max-tokens: all .* of more than 1 tokens, which"
    ):
        begin(config)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("reward", "--reward.model: .* is no reward model, its head is 'lm'"),
        ("draft", "--rollout.draft: the tokenizer of .* has other ids than"),
        ("reference", "--algorithm.reference: the tokenizer of .* has other ids than"),
        ("critic", "--critic.model: the tokenizer of .* has other ids than"),
        ("prm", "--prm.model: the tokenizer of .* has other ids than"),
    ],
)
@pytest.mark.usefixtures("no_warm_start")
def test_a_model_that_does_not_fit_is_refused_before_a_warm_start(
    tmp_path, option, message
):
    other = tmp_path / "other"
    params = models.initialize(jax.random.key(0), models.param_specs(CONFIG))
    tokenizer = Tokenizer.train(["abc"], vocab_size=CONFIG.vocab_size)
    pretrained.save(other, CONFIG, params, tokenizer=tokenizer)
    changes = {
        "reward": {"reward": RewardModelConfig(model=str(other))},
        "draft": {
            "rollout": dataclasses.replace(RL.rollout, draft=str(other), guesses=3)
        },
        "reference": {
            "algorithm": dataclasses.replace(
                RL.algorithm, reference=str(other), kl_coefficient=0.1
            )
        },
        "critic": {
            "algorithm": AlgorithmConfig("ppo"),
            "critic": CriticConfig(model=str(other)),
        },
        "prm": {
            "algorithm": AlgorithmConfig("prime"),
            "prm": PrmConfig(model=str(other)),
        },
    }
    config = dataclasses.replace(WARM, run_dir=str(tmp_path / "run"), **changes[option])
    with pytest.raises(ConfigError, match=message):
        begin(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["rl", "preferences"])
def test_a_run_that_is_stopped_in_its_warm_start_begins_anew(tmp_path, kind):
    asked = []

    def should_stop() -> bool:
        asked.append(None)
        return len(asked) == 2

    folder = tmp_path / "run"
    warm = dataclasses.replace(WARM.warm_start, steps=1000)
    if kind == "rl":
        config = dataclasses.replace(WARM, run_dir=str(folder), warm_start=warm)
        start = online.run_rl
    else:
        rows = [
            {"prompt": f"{i}=", "chosen": "yes", "rejected": "no"} for i in range(40)
        ]
        pairs = tmp_path / "pairs.jsonl"
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = PreferenceConfig(
            run_dir=str(folder),
            warm_start=warm,
            data=PairsConfig(path=str(pairs)),
            max_tokens=16,
        )
        start = offline.run_offline
    out = io.StringIO()
    outcome = start(
        config, console=Console(file=out), command="", should_stop=should_stop
    )
    assert outcome == run.RunResult(0, completed=False, model=None, report=None)
    assert len(asked) == 2
    # Neither a model that a run continues, nor options that it would have to repeat.
    assert not any((folder / name).exists() for name in ("initial", "config.json"))
