"""Layouts: which region of a tensor a shard needs, and the way back."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import ModelConfig, param_specs
from jaxrl_post.models.families import FAMILIES
from jaxrl_post.models.layout import Layout

# A parameter [embed 6, heads 4, head_dim 2]; PyTorch's is [heads * head_dim, embed].
QUERY = Layout.of("(heads head_dim) embed", ("embed", "heads", "head_dim"), (6, 4, 2))
STORED = np.arange(48).reshape(8, 6)


class Regions:
    """A tensor that remembers which regions were asked for."""

    def __init__(self, values):
        self.values = values
        self.asked = []

    def __call__(self, region):
        self.asked.append(tuple((s.start, s.stop) for s in region))
        return self.values[region]


def test_a_query_projection_is_transposed_and_split_into_heads():
    whole = QUERY.read(lambda region: STORED[region], (slice(None),) * 3)
    assert whole.shape == (6, 4, 2)
    for embed, head, dim in itertools.product(range(6), range(4), range(2)):
        assert whole[embed, head, dim] == STORED[head * 2 + dim, embed]


def test_a_shard_asks_for_its_own_region_only():
    regions = Regions(STORED)
    whole = QUERY.read(regions, (slice(None), slice(None), slice(None)))
    shard = QUERY.read(regions, (slice(0, 3), slice(2, 4), slice(None)))
    assert regions.asked == [((0, 8), (0, 6)), ((4, 8), (0, 3))]
    np.testing.assert_array_equal(shard, whole[0:3, 2:4, :])


def test_a_split_inside_a_merged_dim_fetches_the_gaps_too():
    regions = Regions(STORED)
    shard = QUERY.read(regions, (slice(None), slice(1, 3), slice(1, 2)))
    assert regions.asked == [((2, 6), (0, 6))]
    np.testing.assert_array_equal(shard[:, :, 0], STORED[[3, 5]].T)


def test_writing_is_the_inverse_of_reading():
    config = ModelConfig(
        "qwen3",
        vocab_size=11,
        hidden_size=6,
        intermediate_size=10,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
        head="lm+value",
    )
    specs = param_specs(config)
    weights = FAMILIES["qwen3"].weights
    checked = 0
    for path, weight in weights.items():
        spec: Any = specs
        for part in path.replace("layers.*", "layers").split("."):
            spec = getattr(spec, part)
            spec = spec[0] if isinstance(spec, tuple) else spec
        layout = Layout.of(weight.layout, spec.axes, spec.shape)
        value = np.random.default_rng(0).standard_normal(spec.shape, np.float32)
        stored = np.asarray(layout.write(jnp.asarray(value)))
        assert stored.shape == layout.stored_shape
        halves = [[slice(0, n // 2), slice(n // 2, n)] for n in spec.shape]
        for index in itertools.product(*halves):
            shard = layout.read(lambda region, stored=stored: stored[region], index)
            np.testing.assert_array_equal(shard, value[index])
        checked += 1
    assert checked == 22


@pytest.mark.parametrize("text", ["heads embed", "(heads head_dim) embed norm", ""])
def test_a_layout_names_every_axis_once(text):
    with pytest.raises(ValueError, match=r"must name each axis of .* once"):
        Layout.of(text, ("embed", "heads", "head_dim"), (6, 4, 2))
