"""`jaxrl_post.losses` must import in anybody's trainer."""

import importlib
import subprocess
import sys

import pytest

from jaxrl_post import losses

pytestmark = pytest.mark.processes

PROGRAM = """
import sys

import jax
import jax.numpy
try:
    import jaxtyping
except ModuleNotFoundError:
    pass

{block}
before = set(sys.modules)
import jaxrl_post.{package}

new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
extra = new - {{"jaxrl_post"}} - set(sys.stdlib_module_names)
assert not extra, extra
for layer in {forbidden}:
    assert "jaxrl_post." + layer not in sys.modules, layer
for name in "optax", "orbax", "grain", "tokenizers", "tyro", "tensorboardX":
    assert name not in sys.modules, name
{then}
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
ABOVE = [
    *("launch", "train", "rollout", "sampler", "envs", "data"),
    *("models", "kernels", "sharding"),
]


def run(**fields) -> None:
    program = PROGRAM.format(**({"block": "", "then": ""} | fields))
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr


# Other trainers may have no flax.
WITHOUT_FLAX = "sys.modules['flax'] = None"


def test_losses_import_nothing_but_jax_and_this_package():
    then = (
        "from jaxrl_post.losses import reduce, whitening\n"
        "from jaxrl_post.metrics import Metric\n"
        "structure = jax.tree.structure(Metric(1.0, 2.0))\n"
        "assert structure.num_leaves == 2\n"
        "assert jax.tree.unflatten(structure, [1.0, 2.0]) == Metric(1.0, 2.0)"
    )
    forbidden = [*ABOVE, "algorithms"]
    run(package="losses", forbidden=forbidden, block=WITHOUT_FLAX, then=then)


def test_a_module_is_imported_by_the_name_that_it_has_in_the_documentation():
    for name in losses.__all__:
        found = importlib.import_module(f"jaxrl_post.losses.{name}")
        assert found is getattr(losses, name)


def test_losses_import_without_jaxtyping():
    block = (
        "for name in [n for n in sys.modules if n.startswith('jaxtyping')]:\n"
        "    del sys.modules[name]\n"
        "sys.modules['jaxtyping'] = None"
    )
    then = (
        "from jaxrl_post.losses import policy, reduce\n"
        "from jaxrl_post.types import described\n"
        "annotations = reduce.token_mean.__annotations__\n"
        "assert described(annotations['mask']) == ('Bool', '*batch length')\n"
        "class Shape:\n"
        "    shape, ndim, dtype = (3,), 1, jax.numpy.float32\n"
        "try:\n"
        "    policy.reinforce(Shape(), Shape(), Shape())\n"
        "except TypeError as error:\n"
        "    assert 'policy_logprobs must be an array' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('nothing was checked')"
    )
    run(package="losses", forbidden=ABOVE, block=block, then=then)


def test_algorithms_start_no_backend():
    then = "jaxrl_post.algorithms.grpo(kl_coefficient=0.1)"
    run(package="algorithms", forbidden=ABOVE, block=WITHOUT_FLAX, then=then)
