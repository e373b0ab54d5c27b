"""The commands of README.md and of two guides run as they are written."""

import importlib
import json
import re
import shlex
import signal
from functools import reduce
from pathlib import Path
from types import ModuleType

import jax
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_post import models, pretrained
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import ModelConfig
from jaxrl_post.records.directory import read_rows
from launch import cli

ROOT = Path(__file__).parents[2]
# In the order in which a reader runs them: some start from what others made.
PAGES = ("docs/how-to/own-files.md", "docs/how-to/programs.md", "README.md")
SHELL = "".join(
    block
    for page in PAGES
    for block in re.findall(
        r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
    )
).replace("\\\n", " ")
# A recipe has its model and settings: tests/launch/test_recipes.py reads them.
COMMANDS = [
    (program, written)
    for program, written in re.findall(
        r"^python -m launch\.(\w+) (.*)$", SHELL, re.MULTILINE
    )
    if "--recipe" not in written
]

# Heads and sizes that the meshes of the commands divide.
CONFIG = ModelConfig(
    "qwen2", 320, 16, 32, 1, num_heads=8, num_kv_heads=4, max_length=2048,
    qkv_bias=True, tie_embeddings=True,
)  # fmt: skip

# Options that turn them into two steps of a tiny checkpoint; the rest is unchanged.
SAMPLED = (
    "--rollout.prompts-per-step=4", "--rollout.samples-per-prompt=2",
    "--rollout.truncated=reward", "--rollout.max-tokens=8", "--steps=2",
    "--eval.num-tasks=4",
)  # fmt: skip
READ = ("--examples-per-step=8", "--steps=2", "--eval.num-tasks=4")
SHORT = {
    "grpo": SAMPLED,
    "ppo": SAMPLED,
    "distill": SAMPLED,
    "sft": READ,
    "dpo": READ,
    "reward": READ,
    "evaluate": ("--max-tokens=8",),
}


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, rows: list[dict]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_inputs(folder: Path) -> None:
    """The files and models that the commands name, tiny."""
    tokenizer = Tokenizer.train(["What is 1 + 2? #### 3"] * 3, vocab_size=320)
    for name, seed in (("Qwen2.5-0.5B", 0), ("teacher", 1)):
        params = models.initialize(jax.random.key(seed), models.param_specs(CONFIG))
        target = folder / "models" / name
        target.parent.mkdir(exist_ok=True)
        pretrained.save(target, CONFIG, params, tokenizer=tokenizer)
    problems = [
        {"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(60)
    ]
    write_jsonl(folder / "train.jsonl", problems[:40])
    write_jsonl(folder / "test.jsonl", problems[40:])
    write_parquet(
        folder / "problems.parquet",
        [{"question": f"{i} + 1", "answer": str(i + 1)} for i in range(40)],
    )
    roles = ("user", "assistant")
    write_jsonl(
        folder / "chats.jsonl",
        [
            {"messages": [{"role": r, "content": f"{i} {r}"} for r in roles * 2]}
            for i in range(40)
        ],
    )
    write_parquet(
        folder / "pairs.parquet",
        [{"prompt": f"{i}=", "chosen": "yes", "rejected": "no no"} for i in range(40)],
    )
    write_parquet(
        folder / "steps.parquet",
        [
            {"prompt": f"{i}:", "completions": ["a", "b"], "labels": [True, i % 2 == 0]}
            for i in range(40)
        ],
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize(
    ("program", "written"),
    COMMANDS,
    ids=[f"{number}-{program}" for number, (program, _) in enumerate(COMMANDS)],
)
def test_every_command_has_options_that_its_program_takes(
    program, written, inputs, monkeypatch
):
    monkeypatch.chdir(inputs)
    module: ModuleType = importlib.import_module(f"launch.{program}")
    config = cli.read_options(module.PROGRAM, shlex.split(written))
    module.PROGRAM.check(config)
    for option, value in re.findall(r"--([\w.-]+) ('[^']*'|\S+)", written):
        found = value_of(config, option)
        assert found == type(found)(value.strip("'")), option


def value_of(config: object, option: str) -> object:
    """The value of a configuration at an option's place."""
    return reduce(getattr, option.replace("-", "_").split("."), config)


@pytest.mark.all
@pytest.mark.processes
def test_every_command_runs_as_it_is_written(tmp_path, monkeypatch, capsys):
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    try:
        for program, written in COMMANDS:
            if program in ("serve", "chat"):
                # They end when somebody ends them: tests/launch/test_serve.py and
                # tests/programs/test_chat.py run them.
                continue
            module: ModuleType = importlib.import_module(f"launch.{program}")
            arguments = [*shlex.split(written), *SHORT.get(program, ())]
            status = module.main(arguments)
            assert status == 0, f"{program} {written}\n{capsys.readouterr().out}"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    whole = " ".join(written for _, written in COMMANDS)
    named = set(re.findall(r"--run-dir runs/(\w+)", whole))
    assert runs == named
    for run in runs:
        rows = {
            row["step"] for row in read_rows(tmp_path / "runs" / run / "metrics.jsonl")
        }
        assert 2 in rows, run
        assert (tmp_path / "runs" / run / "model" / "config.json").is_file()
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["tasks"], results["samples"]) == (20, 20)
    assert (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.parametrize("program", sorted({program for program, _ in COMMANDS}))
def test_no_command_names_the_settings_of_the_demo(program):
    """A checkpoint's needs are the defaults, so no command has to undo the demo's."""
    for written in (text for name, text in COMMANDS if name == program):
        assert "warm-start" not in written
        assert "schedule" not in written
