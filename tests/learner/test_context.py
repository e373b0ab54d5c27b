"""Context parallelism in the train step: no device has a row's activations whole."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post import algorithms, models
from jaxrl_post.kernels.attention import api
from jaxrl_post.learner import step as pure
from jaxrl_post.learner.step import Policy
from jaxrl_post.sharding import create_mesh, named_shardings
from jaxrl_post.types import TokenBatch
from tests import tiny

# Sizes whose products all differ.
HIDDEN, FFN, ROWS, LENGTH = 88, 104, 2, 8192
CONFIG = models.ModelConfig(
    "llama",
    vocab_size=40,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=12,
    max_length=LENGTH,
)


def batch() -> TokenBatch:
    random = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
    zeros = np.zeros(shape, np.float32)
    return TokenBatch(
        tokens=random.integers(0, 40, shape).astype(np.int32),
        positions=index,
        ends=np.full(shape, LENGTH, np.int32),
        loss_mask=index > 300,
        advantages=random.normal(size=shape).astype(np.float32),
        behavior_logprobs=zeros - 4,
        versions=np.zeros(shape, np.int32),
    )


@pytest.mark.meshes
@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_device_has_the_activations_of_a_row(monkeypatch, remat):
    """Seen in the compiled program, in the forward and the backward pass."""
    monkeypatch.setattr(api, "TILE", 512)
    mesh, specs = create_mesh("dp2,cp4"), models.param_specs(CONFIG)
    policy = Policy(CONFIG, remat=remat)
    objective = algorithms.grpo().objective

    def run(params, batch):
        empty = pure.empty_accumulator(policy, objective, params, batch)
        return pure.accumulate(policy, objective, params, empty, batch)

    with jax.set_mesh(mesh):
        params = jax.device_put(tiny.params(CONFIG), named_shardings(specs, mesh))
        rows = jax.device_put(batch(), NamedSharding(mesh, P(("dp", "fsdp", "ep"))))
        text = jax.jit(run).lower(params, rows).compile().as_text()
    assert text is not None
    assert "collective-permute" in text
    sizes = {
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"f32\[([\d,]+)\]", text)
    }
    # A device has one row, and of it a quarter of the tokens.
    chunk = LENGTH // 4
    assert chunk * HIDDEN in sizes
    assert chunk * FFN in sizes
    for width in (HIDDEN, FFN, HIDDEN // 2, 40):
        assert LENGTH * width not in sizes, width
