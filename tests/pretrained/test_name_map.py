"""Names on disk: layers, experts, shared tensors, older names, larger models."""

import itertools

import numpy as np
import pytest

from jaxrl_post.models import ParamSpec
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.layout import Slot, Weight
from jaxrl_post.pretrained.name_map import (
    entries_of,
    matches,
    paths,
    present,
    some,
    without_prefixes,
)
from tests.pretrained.stored import Stored

WEIGHTS = {
    "embedding": Weight("tok.weight", "vocab embed", also=("wte.weight",)),
    "layers.*.query": Weight("h.*.qkv.weight", "(heads head_dim) embed", part=0),
    "layers.*.key": Weight("h.*.qkv.weight", "(kv_heads head_dim) embed", part=1),
    "layers.*.bias": Weight("h.*.bias", "norm"),
    "layers.*.up": Weight("h.*.mlp.%.up", "ffn embed", also=("h.*.moe.%.w3",)),
    "layers.*.gate": Weight(
        "h.*.gu", "experts embed ffn", part=0, join="interleave", dim=-1
    ),
    "layers.*.lift": Weight(
        "h.*.gu", "experts embed ffn", part=1, join="interleave", dim=-1
    ),
}
WIDE = ("experts", "embed", "ffn")
LAYER = {
    "query": ParamSpec((6, 4, 2), ("embed", "heads", "head_dim")),
    "key": ParamSpec((6, 2, 2), ("embed", "kv_heads", "head_dim")),
    "bias": None,
    "up": ParamSpec((3, 6, 5), WIDE),
    "gate": ParamSpec((3, 6, 5), WIDE),
    "lift": ParamSpec((3, 6, 5), WIDE),
}
SPECS = {"embedding": ParamSpec((7, 6), ("vocab", "embed")), "layers": (LAYER, LAYER)}


def places(entries):
    return {
        (entry.path, entry.expert): (entry.name, entry.shape, entry.slot)
        for entry in entries
    }


def test_every_parameter_gets_its_place():
    found = places(entries_of(WEIGHTS, SPECS))
    assert len(found) == 1 + 2 * (2 + 3 + 2)
    assert found["embedding", None] == ("tok.weight", (7, 6), Slot())
    qkv = ("h.1.qkv.weight", (12, 6))
    assert found["layers.1.query", None] == (*qkv, Slot(0, 0))
    assert found["layers.1.key", None] == (*qkv, Slot(0, 8))
    assert found["layers.0.up", 2] == ("h.0.mlp.2.up", (5, 6), Slot())
    assert found["layers.0.gate", None] == ("h.0.gu", (3, 6, 10), Slot(2, 0, 1, 2))
    assert found["layers.0.lift", None] == ("h.0.gu", (3, 6, 10), Slot(2, 1, 1, 2))


def test_entries_follow_the_tree():
    entries = entries_of(WEIGHTS, SPECS)
    order = [path for path, _ in itertools.groupby(entry.path for entry in entries)]
    assert order == list(paths(SPECS))


def test_parts_are_read_from_their_share():
    rng = np.random.default_rng(0)
    query, key, gate, lift = (
        rng.standard_normal(shape) for shape in [(8, 6), (4, 6), (3, 6, 5), (3, 6, 5)]
    )
    both = np.empty((3, 6, 10))
    both[..., ::2], both[..., 1::2] = gate, lift
    stored = Stored({"h.0.qkv.weight": np.concatenate([query, key]), "h.0.gu": both})
    entries = {entry.path: entry for entry in entries_of(WEIGHTS, SPECS)}

    def read(path, *index):
        entry = entries[f"layers.0.{path}"]
        return entry.read(stored[entry.name].fetch, index)

    part = read("key", slice(0, 3), slice(1, 2), slice(None))
    np.testing.assert_array_equal(part, key[2:4, 0:3].T.reshape(3, 1, 2))
    assert stored.fetched == [("h.0.qkv.weight", (10, 12), (0, 3))]
    part = read("lift", slice(1, 2), slice(None), slice(2, 4))
    np.testing.assert_array_equal(part, lift[1:2, :, 2:4])
    assert stored.fetched[1:] == [("h.0.gu", (1, 2), (0, 6), (5, 8))]
    np.testing.assert_array_equal(
        read("query", *[slice(None)] * 3), query.T.reshape(6, 4, 2)
    )


def test_the_first_name_that_is_there_is_read():
    entries = entries_of(WEIGHTS, SPECS)
    names = {entry.name for entry in present(entries, {"wte.weight", "h.0.moe.1.w3"})}
    assert "wte.weight" in names
    assert "tok.weight" not in names
    assert {"h.0.moe.1.w3", "h.0.mlp.0.up", "h.0.mlp.2.up", "h.1.mlp.1.up"} <= names
    assert present(entries, {"tok.weight", "wte.weight"}) == entries


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, r"no entry for the parameter layers\.\*\.up"),
        (
            {"up": Weight("h.*.%.up", "embed ffn", also=("h.*.up",))},
            r"all or none of \['h\.0\.%\.up', 'h\.0\.up'\] must have a %",
        ),
        ({"up": Weight("h.*.up", "ffn embed")}, r"'ffn embed' must name each axis of"),
        (
            {
                "up": Weight("h.*.up", "experts embed ffn"),
                "gate": Weight("h.*.up", "experts embed ffn", part=1),
            },
            r"the parts of h\.0\.up must be numbered from 0; got \[1, None\]",
        ),
        (
            {
                "up": Weight("h.*.up", "experts embed ffn", part=0),
                "gate": Weight("h.*.up", "experts embed ffn", part=0),
            },
            r"must be numbered from 0; got \[0, 0\]",
        ),
        (
            {
                "up": Weight("h.*.up", "experts embed ffn", part=0),
                "gate": Weight("h.*.up", "experts embed ffn", part=1, dim=1),
            },
            r"the parts of h\.0\.up must agree in also, join, dim and groups",
        ),
        (
            {
                "up": Weight("h.*.up", "experts embed ffn", part=0),
                "gate": Weight("h.*.up", "experts ffn embed", part=1),
            },
            r"may differ in dim 0 alone; got \[\(3, 6, 5\), \(3, 5, 6\)\]",
        ),
        (
            {"up": Weight("h.*.up", "experts embed ffn", part=1)},
            r"must be numbered from 0; got \[1\]",
        ),
    ],
)
def test_mistakes_in_a_family_are_named(weights, message):
    spec = ParamSpec((3, 6, 5), WIDE)
    layer = {name: spec for name in weights or ["up"]}
    with pytest.raises(ValueError, match=message):
        entries_of(
            {f"layers.*.{name}": weight for name, weight in weights.items()},
            {"layers": [layer]},
        )


def test_only_a_first_axis_of_experts_is_numbered():
    spec = ParamSpec((6, 3), ("embed", "experts"))
    with pytest.raises(ValueError, match=r"first axis of up must be 'experts'; got \("):
        entries_of({"up": Weight("%.up", "embed")}, {"up": spec})


# Models that are a part of a larger one.

PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("vision.language_model.x", "vision.language_model.x"),
    ],
)
def test_prefixes_of_larger_models_are_taken_off(name, ours):
    stored = Stored({name: np.zeros(1)})
    assert without_prefixes(stored, PREFIXES) == {ours: stored[name]}
    assert without_prefixes(stored, ()) == stored


def test_two_tensors_of_one_name_are_refused():
    names = ("model.norm.weight", "language_model.model.norm.weight")
    stored = Stored({name: np.zeros(1) for name in names})
    with pytest.raises(
        CheckpointError,
        match=r"memory\.safetensors: tensors model\.norm\.weight and language_model\.m"
        r"odel\.norm\.weight both are model\.norm\.weight; remove the one",
    ):
        without_prefixes(stored, PREFIXES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq.x", False),
        ("model.layers.61.mlp.gate.weight", True),
        ("model.layers.100.mlp.gate.weight", True),
        ("model.layers.101.mlp.gate.weight", False),
        ("model.layers.60.mlp.gate.weight", False),
        ("model.layers.9.mlp.gate.weight", False),
        ("model.layersX61.mlp", False),
        ("vision_tower.blocks.0", True),
        ("my_vision_tower.blocks.0", False),
    ],
)
def test_what_a_family_ignores(name, expected):
    patterns = ("*.rotary_emb.inv_freq", "model.layers.+.*", "vision_tower.*")
    assert matches(patterns, name, num_layers=61, further_layers=40) is expected


def test_many_names_are_counted():
    assert some({"b", "a"}) == "a, b"
    assert some({f"n{i}" for i in range(6)}) == "n0, n1, n2, n3, ... (6 in all)"
