"""Layouts and slots: which region of a tensor a shard needs, and the way back."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from jaxrl_post.models import ModelConfig, param_specs
from jaxrl_post.pretrained.families import FAMILIES
from jaxrl_post.pretrained.layout import Layout, Slot, slots
from jaxrl_post.pretrained.name_map import paths

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
        qk_norm="head",
        head="lm+value",
    )
    process = dataclasses.replace(config, head="process")
    specs = paths(param_specs(config)) | paths(param_specs(process))
    weights = FAMILIES["qwen3"].weights
    checked = 0
    for path, weight in weights.items():
        spec = specs[path.replace("layers.*", "layers.0")]
        layout = Layout.of(weight.layout, spec.axes, spec.shape)
        value = np.random.default_rng(0).standard_normal(spec.shape, np.float32)
        stored = np.full(layout.stored_shape, np.nan, np.float32)
        halves = [[slice(0, n // 2), slice(n // 2, n)] for n in spec.shape]
        for index in itertools.product(*halves):
            layout.write(stored, value[index].transpose(layout.order), index)
        for index in itertools.product(*halves):
            shard = layout.read(lambda region, stored=stored: stored[region], index)
            np.testing.assert_array_equal(shard, value[index])
        checked += 1
    assert checked == 24


@pytest.mark.parametrize("text", ["heads embed", "(heads head_dim) embed norm", ""])
def test_a_layout_names_every_axis_once(text):
    with pytest.raises(ValueError, match=r"must name each axis of .* once"):
        Layout.of(text, ("embed", "heads", "head_dim"), (6, 4, 2))


def test_an_empty_group_is_a_dim_of_size_one():
    """The kernels of torch.nn.Conv1d are [channels, 1, width]."""
    layout = Layout.of("embed () head_dim", ("head_dim", "embed"), (2, 6))
    assert layout.stored_shape == (6, 1, 2)
    stored = np.arange(12).reshape(6, 1, 2)
    regions = Regions(stored)
    shard = layout.read(regions, (slice(None), slice(2, 4)))
    assert regions.asked == [((2, 4), (0, 1), (0, 2))]
    np.testing.assert_array_equal(shard, stored[2:4, 0].T)
    whole = layout.read(lambda region: stored[region], (slice(None), slice(None)))
    written = np.empty_like(stored)
    layout.write(written, whole.T, (slice(None), slice(None)))
    np.testing.assert_array_equal(written, stored)


# Parts that share a tensor.


def test_concatenated_parts_follow_one_another():
    """Phi-3's qkv_proj: 4 rows of queries, 2 of keys, 2 of values."""
    assert slots((4, 2, 2), "concat", 0) == (
        Slot(dim=0, start=0),
        Slot(dim=0, start=4),
        Slot(dim=0, start=6),
    )


def test_interleaved_parts_take_turns():
    """gpt-oss: gate_up_proj[..., ::2] are the gates, [..., 1::2] what they gate."""
    gate, up = slots((3, 3), "interleave", 1)
    stored = np.arange(12).reshape(2, 6)
    whole = (slice(0, 2), slice(0, 3))
    fetch = lambda region: stored[region]  # noqa: E731
    np.testing.assert_array_equal(gate.read(fetch, whole), [[0, 2, 4], [6, 8, 10]])
    np.testing.assert_array_equal(up.read(fetch, whole), [[1, 3, 5], [7, 9, 11]])


@pytest.mark.parametrize(
    ("slot", "asked", "expected"),
    [
        (Slot(1, 4), ((1, 2), (6, 8)), [[14, 15]]),
        (Slot(1, 1, 1, 2), ((1, 2), (5, 8)), [[13, 15]]),
        (Slot(1, 0, 1, 2), ((1, 2), (4, 7)), [[12, 14]]),
    ],
)
def test_a_region_of_a_part_is_fetched_alone(slot, asked, expected):
    regions = Regions(np.arange(16).reshape(2, 8))
    found = slot.read(regions, (slice(1, 2), slice(2, 4)))
    assert regions.asked == [asked]
    np.testing.assert_array_equal(found, expected)


def test_an_empty_region_of_a_part_is_empty():
    regions = Regions(np.arange(16).reshape(2, 8))
    found = Slot(1, 1, 1, 2).read(regions, (slice(0, 2), slice(1, 1)))
    assert found.shape == (2, 0)
    assert regions.asked == [((0, 2), (3, 3))]


def fill(own, part):
    own[...] = part


def fill_half(half, part, own):
    own[:, half] = part[:, half]


def test_grouped_parts_take_turns_in_blocks():
    """Qwen3-Next: each key head has its rows of queries, keys and values."""
    query, value = slots((4, 8), "grouped", 1, groups=2)
    stored = np.arange(24).reshape(2, 12)
    for start, stop in ((0, 8), (0, 4), (3, 6), (5, 6), (2, 2)):
        region = slice(0, 2), slice(start, stop)
        found = value.read(lambda region: stored[region], region)
        expected = stored[:, [2, 3, 4, 5, 8, 9, 10, 11]][:, start:stop]
        np.testing.assert_array_equal(found, expected)
    whole = slice(0, 2), slice(0, 4)
    found = query.read(lambda region: stored[region], whole)
    np.testing.assert_array_equal(found, stored[:, [0, 1, 6, 7]])
    written = np.zeros_like(stored)
    for slot, size in ((query, 4), (value, 8)):
        part = slot.read(lambda region: stored[region], (slice(0, 2), slice(0, size)))
        # One region after the other, as shards come.
        for half in (slice(0, size // 2), slice(size // 2, size)):
            slot.write(written, size, functools.partial(fill_half, half, part))
    np.testing.assert_array_equal(written, stored)


def test_groups_divide_every_part():
    with pytest.raises(ValueError, match=r"3 groups must divide \(3, 4\)"):
        slots((3, 4), "grouped", 0, groups=3)


@pytest.mark.parametrize("join", ["concat", "interleave"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_writing_parts_is_the_inverse_of_reading_them(join, dim):
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((2, 3, 4)) for _ in range(3)]
    shape = [2, 3, 4]
    shape[dim] *= 3
    tensor = np.full(shape, np.nan)
    places = slots((parts[0].shape[dim],) * 3, join, dim)
    for slot, part in zip(places, parts, strict=True):
        slot.write(tensor, part.shape[dim], lambda own, part=part: fill(own, part))
    if join == "concat":
        expected = np.concatenate(parts, axis=dim)
    else:
        expected = np.stack(parts, axis=dim + 1).reshape(shape)
    np.testing.assert_array_equal(tensor, expected)
    whole = tuple(slice(0, n) for n in (2, 3, 4))
    for slot, part in zip(places, parts, strict=True):
        found = slot.read(lambda region: tensor[region], whole)
        np.testing.assert_array_equal(found, part)


def test_parts_of_different_sizes_cannot_be_interleaved():
    with pytest.raises(ValueError, match=r"must have one size; got \(4, 2\)"):
        slots((4, 2), "interleave", 0)


def write_query(shard, index, own):
    QUERY.write(own, shard, index)


@pytest.mark.parametrize("join", ["concat", "interleave"])
def test_a_part_with_merged_dims_is_written_into_the_whole(join):
    """The share is a view with gaps, and is split into heads without a copy."""
    values = [np.arange(48).reshape(6, 4, 2) + 100 * part for part in range(2)]
    tensor = np.zeros((16, 6), int)
    for slot, value in zip(slots((8, 8), join, 0), values, strict=True):
        for heads in (slice(0, 1), slice(1, 4)):
            index = (slice(0, 6), heads, slice(None))
            shard = value[index].transpose(1, 2, 0)
            slot.write(tensor, 8, functools.partial(write_query, shard, index))
    flat = [value.transpose(1, 2, 0).reshape(8, 6) for value in values]
    if join == "concat":
        np.testing.assert_array_equal(tensor, np.concatenate(flat))
    else:
        np.testing.assert_array_equal(tensor[0::2], flat[0])
        np.testing.assert_array_equal(tensor[1::2], flat[1])
