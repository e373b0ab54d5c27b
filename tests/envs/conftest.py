"""The module of scripted environments, and pools on every kind of host."""

import functools
import importlib
import importlib.util
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from jaxrl_post.envs import WorkerPool
from jaxrl_post.envs.workers.interface import MakeWorker
from jaxrl_post.envs.workers.ray_worker import RayCluster


@pytest.fixture(scope="session")
def scripted() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("scripted_environments")


@pytest.fixture(scope="session")
def ray_token() -> Iterator[None]:
    """Clusters of this process ask for a token of its own, and none is joined."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs the extra ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
        yield


@pytest.fixture(scope="session")
def local_ray(ray_token) -> Iterator[MakeWorker]:
    with RayCluster("local", cpus_per_worker=0.01) as cluster:
        driver = cluster._driver
        yield cluster.worker
        assert cluster._driver is driver, "the connection to the cluster was lost"


# test_ray.py has turns, sessions and deaths on Ray's workers in `make test`.
@pytest.fixture(
    scope="session", params=["local", pytest.param("ray", marks=pytest.mark.all)]
)
def make_pool(request: pytest.FixtureRequest) -> Callable[..., WorkerPool]:
    """A `WorkerPool` of processes of this machine, and one of a Ray cluster's."""
    if request.param == "local":
        return WorkerPool
    make_worker = request.getfixturevalue("local_ray")
    return functools.partial(WorkerPool, make_worker=make_worker)
