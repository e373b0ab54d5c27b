"""Options of samplers in other processes."""

import dataclasses

import pytest

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import FleetConfig
from jaxrl_post.config.run import ProcessesConfig
from jaxrl_post.config.serve import ServeConfig, check_server
from launch import cli, grpo


@pytest.mark.parametrize(
    ("given", "own", "remote"),
    [("0", 0, 0), ("3", 3, 0), ("any:1", 0, 1), ("any:64", 0, 64)],
)
def test_samplers_are_own_or_remote(given, own, remote):
    config = cli.read_options(grpo.PROGRAM, ["--samplers", given])
    assert (config.own_samplers, config.remote_samplers) == (own, remote)
    check_options(config)


def rl(**options) -> RLConfig:
    return dataclasses.replace(RLConfig(), **options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (rl(samplers=-1), r"--samplers: must be at least 0; got -1"),
        (
            rl(samplers="any"),
            r"--samplers: must be a number .* such as any:2; got 'any'",
        ),
        (rl(samplers="any:0"), r"--samplers: must be a number"),
        (rl(samplers="http://a:1"), r"--samplers: must be a number"),
        (
            rl(fleet=FleetConfig(least=2)),
            r"--fleet.*: is for samplers in other processes; give --samplers any:N",
        ),
        (
            rl(samplers="any:1", fleet=FleetConfig("7777")),
            r"--fleet.listen: must be HOST:PORT, such as 127.0.0.1:7777; got '7777'",
        ),
        (
            rl(samplers="any:1", fleet=FleetConfig("127.0.0.1:70000")),
            r"--fleet.listen: must be HOST:PORT",
        ),
        (
            rl(samplers="any:1", fleet=FleetConfig("0.0.0.0:7777")),
            r"--fleet.listen: 0.0.0.0 can be reached .* give --fleet.key-file",
        ),
        (
            rl(samplers="any:1", fleet=FleetConfig(key_file="missing.txt")),
            r"--fleet.key-file: cannot read missing.txt",
        ),
        (
            rl(
                samplers="any:1",
                rollout=dataclasses.replace(RLConfig().rollout, mesh="tp2"),
            ),
            r"--rollout.mesh: samplers in other processes each have the --mesh",
        ),
    ],
)
def test_what_makes_no_sense_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        check_options(config)


def test_an_empty_key_is_none(tmp_path):
    (tmp_path / "key").write_text(" \n")
    config = rl(samplers="any:1", fleet=FleetConfig(key_file=str(tmp_path / "key")))
    with pytest.raises(ConfigError, match=r"--fleet.key-file: .* is empty"):
        check_options(config)
    (tmp_path / "key").write_text("secret\n")
    config = rl(
        samplers="any:1",
        fleet=FleetConfig("0.0.0.0:7777", key_file=str(tmp_path / "key")),
    )
    check_options(config)
    assert config.fleet.key == "secret"


def follow(**options) -> ServeConfig:
    return ServeConfig(follow="http://127.0.0.1:7777", **options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ServeConfig(), r"--model: is missing; give a model, or --follow a trainer"),
        (ServeConfig(follow="127.0.0.1:7777"), r"--follow: must be the trainer's addr"),
        (ServeConfig(follow="ftp://a:1"), r"--follow: .* or the directory of its run"),
        (ServeConfig(follow="http://a:1/v1"), r"--follow: must be the trainer's addr"),
        (
            ServeConfig("demo", processes=ProcessesConfig(count=2)),
            r"--processes.\*: a server is one process; only with --follow",
        ),
        (follow(model="demo"), r"--model: with --follow the trainer says"),
        (follow(seed=3), r"--seed: with --follow the trainer says"),
        (follow(name="a,b"), r"--name: of a sampler must be letters.*; got 'a,b'"),
        (follow(num_slots=8), r"--num-slots: with --follow the trainer says"),
        (follow(follow_wait_s=0.0), r"--follow-wait-s: must be greater than 0; got 0"),
        (follow(host="0.0.0.0"), r"--host: 0.0.0.0 can be reached"),
    ],
)
def test_what_a_sampler_does_not_read_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        check_server(config)


def test_a_sampler_takes_a_mesh_a_name_and_a_port():
    check_server(follow(mesh="tp2", name="first", port=0))
    check_server(follow(processes=ProcessesConfig("10.0.0.1:4000", 2, 1)))
    check_server(ServeConfig(follow="https://trainer.local/"))
    # The directory of a run, which the trainer may not have made yet.
    check_server(ServeConfig(follow="/shared/runs/a"))
