"""Errors of the system for a path name the option that held it."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.convert import ConvertConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.files.suite import check_evaluation
from jaxrl_post.config.offline import (
    PairsConfig,
    PreferenceConfig,
    PreferenceLossConfig,
    SFTConfig,
)
from jaxrl_post.config.paths import check_output, check_paths, naming
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig

LONG = "x" * 300


def refused(check, *arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*arguments)
    return str(caught.value)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("")
    return path


def data_files(path: str, good: str) -> list[tuple[str, SFTConfig | PreferenceConfig]]:
    return [
        ("--data.path", SFTConfig(data=DataConfig(path=path))),
        ("--data.eval-path", SFTConfig(data=DataConfig(good, eval_path=path))),
        ("--data.path", PreferenceConfig(data=PairsConfig(path=path))),
    ]


@pytest.mark.parametrize("place", range(3))
def test_a_data_file_that_cannot_be_read_is_named_with_its_option(file, place):
    for path, why in (
        (str(file.with_name("absent")), errno.ENOENT),
        (str(file / "below"), errno.ENOTDIR),
        (str(file.parent), errno.EISDIR),
        (str(file.with_name(LONG)), errno.ENAMETOOLONG),
    ):
        option, config = data_files(path, str(file))[place]
        told = f"{option}: {path}: {os.strerror(why)}"
        assert refused(check_options, config) == told
    for path in (str(file), "hf://datasets/org/name/rows.jsonl"):
        check_options(data_files(path, str(file))[place][1])


def test_an_empty_path_is_shown():
    config = SFTConfig(data=DataConfig(path=""))
    told = refused(check_options, config)
    assert told == "--data.path: '': No such file or directory"


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("--run-dir", SFTConfig(run_dir=LONG)),
        ("--model", SFTConfig(model=LONG)),
        ("--critic.model", RLConfig(critic=CriticConfig(model=LONG))),
        ("--prm.model", RLConfig(prm=PrmConfig(model=LONG))),
        ("--algorithm.reference", RLConfig(algorithm=AlgorithmConfig(reference=LONG))),
        ("--rollout.draft", RLConfig(rollout=RolloutConfig(draft=LONG))),
        (
            "--loss.reference",
            PreferenceConfig(loss=PreferenceLossConfig(reference=LONG)),
        ),
        ("--model", EvaluateConfig(LONG)),
        ("--input", ConvertConfig(LONG, "made")),
        ("--base", ConvertConfig("run", "made", base=LONG)),
    ],
)
def test_a_path_that_the_system_refuses_is_named_with_its_option(option, config):
    if isinstance(config, RLConfig):
        # Other options that they need are not checked.
        check = check_paths
    elif isinstance(config, EvaluateConfig):
        check = check_evaluation
    else:
        check = check_paths if isinstance(config, ConvertConfig) else check_options
    assert refused(check, config) == f"{option}: {LONG}: File name too long"


def test_a_model_may_be_what_is_no_path():
    check_paths(SFTConfig(model="demo"))
    check_paths(SFTConfig(model="Qwen/Qwen2.5-0.5B"))


def test_an_output_is_looked_at_before_the_work(file, tmp_path):
    for path, told in (
        (file, f"{file} is already there; remove it or write elsewhere"),
        (file / "deep" / "out", f"{file}: Not a directory"),
        (tmp_path / LONG, f"{tmp_path / LONG}: File name too long"),
    ):
        assert refused(check_output, path, "--output") == f"--output: {told}"
    config = EvaluateConfig("demo", output=str(file / "out.json"))
    assert refused(check_evaluation, config) == f"--output: {file}: Not a directory"
    check_output(tmp_path / "new" / "out", "--output")
    check_evaluation(dataclasses.replace(config, output=str(tmp_path / "out.json")))
    assert sorted(tmp_path.iterdir()) == [file]


def test_where_nothing_may_be_written(file, monkeypatch):
    # The superuser may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    folder = file.parent
    told = f"--output: {folder}: Permission denied"
    assert refused(check_output, folder / "out", "--output") == told
    config = SFTConfig(data=DataConfig(path=str(file)))
    assert refused(check_options, config) == f"--data.path: {file}: Permission denied"


def test_an_error_without_a_file_is_told_as_it_is():
    with (
        pytest.raises(ConfigError, match=r"^--output: out of order$"),
        naming("--output"),
    ):
        raise OSError("out of order")
