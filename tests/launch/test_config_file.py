"""Files of options in YAML and TOML, what a file's model implies, and the dry run."""

import dataclasses
import json

import pytest

from launch import cli, grpo
from launch.names import PROGRAMS, program_of


def read(file, *arguments: str):
    return cli.read_options(grpo.PROGRAM, ["--config", str(file), *arguments])


def written(tmp_path, values) -> str:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values))
    return str(path)


YAML = """
model: ORG/NAME  # on the hub
optimizer:
  learning_rate: 1e-7
rollout: {stop_strings: ["</a>"], temperature: 1}
data: {path: null}
"""
TOML = """
model = "ORG/NAME"
optimizer.learning_rate = 1e-7

[rollout]
stop_strings = ["</a>"]
temperature = 1
"""


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.TOML", TOML)])
def test_yaml_and_toml_are_files_of_options(name, text, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    config = read(file, "--steps", "3")
    assert (config.model, config.steps) == ("ORG/NAME", 3)
    assert config.optimizer.learning_rate == 1e-7
    assert config.rollout.stop_strings == ("</a>",)
    assert config.rollout.temperature == 1.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"steps: 3\nsteps: 4", "cannot read .*a.yaml: key 'steps' appears"),
        (
            "a.yml",
            b"steps: [",
            "cannot read .*a.yml: not YAML: while parsing .* line 1",
        ),
        ("a.yaml", b"- steps", r"a.yaml must hold an object; got \['steps'\]"),
        ("a.yaml", b"", "a.yaml must hold an object; got None"),
        ("a.yaml", b"steps: 3\n---\nsteps: 4", "not YAML: expected a single document"),
        ("a.yaml", b"steps: !!python/name:os.system", "not YAML: could not determine"),
        ("a.yaml", b"\x89PNG", "cannot read .*a.yaml: 'utf-8' codec"),
        ("a.yaml", b"[" * 5000, "cannot read .*a.yaml: nested too deeply"),
        ("a.yaml", b"steps: no", "steps must be int; got False"),
        (
            "a.yaml",
            b"template: {date: 2026-07-26}",
            "date must be str .*; got datetime",
        ),
        ("a.yaml", b"1: 2", "unknown key 1; known: "),
        (
            "a.toml",
            b"steps = 3\nsteps = 4",
            "not TOML: Cannot overwrite a value",
        ),
        ("a.toml", b"steps: 3", "cannot read .*a.toml: not TOML: Expected '='.*line 1"),
        ("a.toml", b"steps = '3'", "steps must be int; got '3'"),
        ("a.txt", b"steps: 3", "cannot read .*a.txt: not JSON"),
    ],
)
def test_a_bad_file_of_yaml_or_toml_is_an_error(name, content, message, tmp_path):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(file)


@pytest.mark.parametrize(
    ("values", "rate", "warm"),
    [
        ({"model": "ORG/NAME"}, 1e-6, 0),
        ({"model": "ORG/NAME", "lora": {"rank": 8}}, 1e-5, 0),
        ({"model": "tiny"}, 5e-4, 400),
        ({"model": "ORG/NAME", "optimizer": {"learning_rate": 0.5}}, 0.5, 0),
    ],
)
def test_defaults_depend_on_the_model_of_the_file(values, rate, warm, tmp_path):
    path = written(tmp_path, values)
    config = read(path)
    assert (config.optimizer.learning_rate, config.warm_start.steps) == (rate, warm)
    # The command line comes after the file.
    config = read(path, "--model", "tiny")
    assert config.optimizer.learning_rate == (0.5 if rate == 0.5 else 5e-4)


def test_a_file_of_another_framework_is_answered_with_our_options(tmp_path):
    file = tmp_path / "verl.yaml"
    file.write_text(
        "actor_rollout_ref:\n  rollout: {n: 8}\n  actor: {grad_clip: 1.0}\nsteps: 3\n"
    )
    with pytest.raises(ValueError, match=r"\A(?s:.+)\Z") as caught:
        read(file)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{file}: --actor_rollout_ref.rollout.n: verl's ")
    assert first.endswith("is --rollout.samples-per-prompt")
    assert second.endswith("is --optimizer.max-grad-norm")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_dry_run_prints_a_file_of_options_and_does_nothing(name, tmp_path, capsys):
    needed = {
        "evaluate": ["--model", "tiny"],
        "convert": ["--input", "a", "--output", "b"],
        "chat": ["--model", "tiny"],
        "serve": ["--model", "tiny"],
        "doctor": ["runs/a"],
        "redteam": ["--env", "arithmetic"],
        "report": ["runs/a"],
        "watch": ["runs/a"],
        "plan": ["--model", "tiny", "--topology", "v5e:2x2"],
    }

    def load():
        raise AssertionError("nothing is imported")

    program = dataclasses.replace(program_of(name), load=load)
    assert cli.call(program, [*needed.get(name, []), "--dry-run"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = cli.read_options(program, needed.get(name, []))
    assert printed == json.loads(json.dumps(dataclasses.asdict(expected)))
    if name not in needed:
        path = written(tmp_path, printed)
        assert cli.read_options(program, ["--config", path]) == expected


def test_a_dry_run_refuses_what_a_run_refuses(capsys):
    assert grpo.main(["--dry-run", "--mesh", "xx4"]) == 1
    told = capsys.readouterr()
    assert "--mesh" in told.out + told.err
    assert "{" not in told.out
