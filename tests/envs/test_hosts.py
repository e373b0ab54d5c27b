"""Hosts of workers, as an option names them."""

import sys

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rollout import check_judges
from jaxrl_post.envs.workers.hosts import check_hosts, open_hosts
from jaxrl_post.envs.workers.process import WorkerProcess


@pytest.mark.parametrize(
    "hosts",
    ["local", "ray", "ray:local", "ray:10.0.0.1:6379", "ray:head.lan:1", "ray:[::1]:9"],
)
def test_hosts_are_local_or_of_a_ray_cluster(hosts):
    check_hosts(hosts)


@pytest.mark.parametrize(
    "hosts",
    [
        "", "Local", "local:", "local:6379", "ray:", "ray:head", "ray:head:", "ray::1",
        "ray:head:0", "ray:head:65536", "ray:head:six", "ray://head:1", "slurm",
        "10.0.0.1:6379",
    ],
)  # fmt: skip
def test_what_names_no_hosts_is_refused(hosts):
    with pytest.raises(ValueError, match=r"must be local, ray, ray:local or ray:HOST"):
        check_hosts(hosts)


def test_local_workers_need_no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    check_judges("local", 1.0, "rollout.")
    with open_hosts("local") as make_worker:
        assert make_worker is WorkerProcess


@pytest.mark.parametrize(
    ("judges", "cpus", "error"),
    [
        ("nowhere", 1.0, r"^--rollout\.judges: must be local, .* got 'nowhere'$"),
        (
            "local",
            0.5,
            r"^--rollout\.reward-cpus: processes of this .* got 0\.5; ",
        ),
        ("ray", 1.0, r"^--rollout\.judges ray: there is no module 'ray': pip install "),
    ],
)
def test_options_of_judges_are_checked(monkeypatch, judges, cpus, error):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=error):
        check_judges(judges, cpus, "rollout.")
