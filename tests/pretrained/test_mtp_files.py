"""Layers for multi-token prediction on disk: read, computed from tensors, refused."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_post import pretrained
from jaxrl_post.models import forward
from jaxrl_post.models.mtp import MTPTokens, mtp_specs, with_mtp_layer
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.sharding import create_mesh, named_shardings

FIXTURES = Path(__file__).parents[1] / "parity/fixtures"
DENSE, EXPERTS = "qwen3_5_text", "qwen3_5_moe_text"


def with_layer(folder: Path, name: str, joined: bool = False) -> dict[str, np.ndarray]:
    """Copies a fixture and adds a layer's tensors; returns them."""
    shutil.copytree(FIXTURES / name, folder)
    raw = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(0)
    hidden, heads, dim = (
        raw[k] for k in ("hidden_size", "num_attention_heads", "head_dim")
    )
    kv = raw["num_key_value_heads"]
    shapes = {
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
        "fc.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * heads * dim, hidden),
        "layers.0.self_attn.k_proj.weight": (kv * dim, hidden),
        "layers.0.self_attn.v_proj.weight": (kv * dim, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * dim),
        "layers.0.self_attn.q_norm.weight": (dim,),
        "layers.0.self_attn.k_norm.weight": (dim,),
    }

    def mlp(width: int) -> dict[str, tuple[int, ...]]:
        inner = (width, hidden)
        return {"gate_proj": inner, "up_proj": inner, "down_proj": inner[::-1]}

    parts = {"layers.0.mlp.": mlp(raw["intermediate_size"])}
    if name == EXPERTS:
        count, width = raw["num_experts"], raw["moe_intermediate_size"]
        shapes["layers.0.mlp.gate.weight"] = (count, hidden)
        shapes["layers.0.mlp.shared_expert_gate.weight"] = (1, hidden)
        shared = mlp(raw["shared_expert_intermediate_size"])
        parts = {"layers.0.mlp.shared_expert.": shared}
        if joined:
            shapes["layers.0.mlp.experts.gate_up_proj"] = (count, 2 * width, hidden)
            shapes["layers.0.mlp.experts.down_proj"] = (count, hidden, width)
        else:
            for expert in range(count):
                parts[f"layers.0.mlp.experts.{expert}."] = mlp(width)
    for prefix, own in parts.items():
        shapes |= {f"{prefix}{part}.weight": shape for part, shape in own.items()}
    made = {
        f"mtp.{part}": rng.normal(0, 0.3, shape).astype(np.float32)
        for part, shape in shapes.items()
    }
    save_file(made, folder / "mtp.safetensors")
    whole = folder / "model.safetensors"
    names = load_names(whole)
    whole.rename(folder / "trunk.safetensors")
    write_index(folder, dict.fromkeys(names, "trunk.safetensors"), made)
    return made


def write_index(folder: Path, files: dict[str, str], made) -> None:
    files = {name: file for name, file in files.items() if not name.startswith("mtp.")}
    files |= dict.fromkeys(made, "mtp.safetensors")
    told = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(told)


def load_names(path: Path) -> list[str]:
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    return [name for name in header if name != "__metadata__"]


def by_numpy(made, raw, embedded, before):
    """The layer's final hidden states, token by token from its tensors."""
    w = {
        name.removeprefix("mtp.").removesuffix(".weight"): x for name, x in made.items()
    }
    layer = {n.removeprefix("layers.0."): x for n, x in w.items() if n[:2] == "la"}
    heads, kv, dim = (
        raw[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    rope = raw["rope_parameters"]
    turned = int(dim * rope["partial_rotary_factor"])

    def norm(x, weight):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + raw["rms_norm_eps"])
        return x * (1 + weight)

    def rotate(x, at):
        rates = rope["rope_theta"] ** (-np.arange(0, turned, 2) / turned)
        angle = np.concatenate([at * rates] * 2)
        part, rest = x[..., :turned], x[..., turned:]
        left, right = np.split(part, 2, axis=-1)
        part = part * np.cos(angle) + np.concatenate([-right, left], -1) * np.sin(angle)
        return np.concatenate([part, rest], -1)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    keys, values, found = [], [], []
    for at, (e, h) in enumerate(zip(embedded, before, strict=True)):
        e = norm(e, w["pre_fc_norm_embedding"])
        h = norm(h, w["pre_fc_norm_hidden"])
        x = w["fc"] @ np.concatenate([e, h])
        y = norm(x, layer["input_layernorm"])
        asked = (layer["self_attn.q_proj"] @ y).reshape(heads, 2, dim)
        query = rotate(norm(asked[:, 0], layer["self_attn.q_norm"]), at)
        key = norm(
            (layer["self_attn.k_proj"] @ y).reshape(kv, dim), layer["self_attn.k_norm"]
        )
        keys.append(rotate(key, at))
        values.append((layer["self_attn.v_proj"] @ y).reshape(kv, dim))
        mixed = []
        for head in range(heads):
            group = head * kv // heads
            scores = np.array([query[head] @ k[group] for k in keys]) / np.sqrt(dim)
            share = np.exp(scores - scores.max())
            mixed.append(share @ np.array([v[group] for v in values]) / share.sum())
        gated = np.array(mixed) * sigmoid(asked[:, 1])
        x = x + layer["self_attn.o_proj"] @ gated.reshape(-1)
        y = norm(x, layer["post_attention_layernorm"])
        gate = layer["mlp.gate_proj"] @ y
        inner = gate * sigmoid(gate) * (layer["mlp.up_proj"] @ y)
        x = x + layer["mlp.down_proj"] @ inner
        found.append(norm(x, w["norm"]))
    return np.array(found)


def computed(folder: Path, tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
    _, params = pretrained.load(folder, dtype=jnp.float32)
    config, layer = pretrained.load_mtp(folder, dtype=jnp.float32)
    given = MTPTokens(
        jnp.asarray(tokens[None]), jnp.asarray(before[None]), layer, config
    )
    return np.asarray(forward(with_mtp_layer(params, layer), config, given)[0])


def inputs(vocab: int, hidden: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, vocab, 9).astype(np.int32)
    return tokens, rng.normal(size=(9, hidden)).astype(np.float32)


def test_the_layer_is_computed_from_its_tensors(tmp_path):
    folder = tmp_path / "model"
    made = with_layer(folder, DENSE)
    raw = json.loads((folder / "config.json").read_text())
    tokens, before = inputs(raw["vocab_size"], raw["hidden_size"])
    _, params = pretrained.load(folder, dtype=jnp.float32)
    embedded = np.asarray(params.embedding)[tokens]
    expected = by_numpy(made, raw, embedded, before)
    np.testing.assert_allclose(computed(folder, tokens, before), expected, atol=1e-4)
    # The order of the halves is told apart.
    made["mtp.fc.weight"] = np.roll(made["mtp.fc.weight"], raw["hidden_size"], axis=1)
    other = by_numpy(made, raw, embedded, before)
    assert np.abs(other - expected).max() > 0.1


def test_experts_apart_or_joined(tmp_path):
    """Both forms of a file give the same layer."""
    with_layer(tmp_path / "joined", EXPERTS, joined=True)
    made = load_file(tmp_path / "joined/mtp.safetensors")
    with_layer(tmp_path / "apart", EXPERTS)
    stem = "mtp.layers.0.mlp.experts."
    both, down = made.pop(stem + "gate_up_proj"), made.pop(stem + "down_proj")
    for expert, (upper, lower) in enumerate(zip(both, down, strict=True)):
        gate, up = np.split(upper, 2)
        for part, values in (("gate", gate), ("up", up), ("down", lower)):
            made[f"{stem}{expert}.{part}_proj.weight"] = np.ascontiguousarray(values)
    save_file(made, tmp_path / "apart/mtp.safetensors")
    tokens, before = inputs(72, 32)
    found = computed(tmp_path / "joined", tokens, before)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, computed(tmp_path / "apart", tokens, before))


def test_it_is_saved_with_the_model(tmp_path):
    made = with_layer(tmp_path / "model", DENSE)
    config, params = pretrained.load(tmp_path / "model")
    pretrained.save(tmp_path / "saved", config, params, source=tmp_path / "model")
    _, layer = pretrained.load_mtp(tmp_path / "saved", dtype=jnp.float32)
    np.testing.assert_array_equal(layer.fusion, made["mtp.fc.weight"].T)


@pytest.mark.meshes
def test_on_a_mesh_and_abstract(tmp_path):
    with_layer(tmp_path / "model", DENSE)
    mesh = create_mesh("fsdp2,tp2", jax.devices()[:4])
    config, layer = pretrained.load_mtp(tmp_path / "model", mesh=mesh)
    _, whole = pretrained.load_mtp(tmp_path / "model")
    wanted = named_shardings(mtp_specs(config), mesh)
    _, shapes = pretrained.load_mtp(tmp_path / "model", mesh=mesh, weights=False)
    for split, one, sharding, shape in zip(
        *map(jax.tree.leaves, (layer, whole, wanted, shapes)), strict=True
    ):
        np.testing.assert_array_equal(split, one)
        assert split.sharding == sharding == shape.sharding
        assert (split.shape, split.dtype) == (shape.shape, shape.dtype)


def change(folder: Path, edit) -> None:
    path = folder / "mtp.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    write_index(folder, index["weight_map"], tensors)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda t: t.pop("mtp.fc.weight"), "missing tensors: mtp.fc.weight"),
        (
            lambda t: t.update({"mtp.layers.1.norm": t["mtp.norm.weight"]}),
            r"unknown tensors: mtp.layers.1.norm",
        ),
        (
            lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].T.copy()}),
            r"tensor mtp.fc.weight has shape \(64, 32\), but config.json asks for",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(tmp_path, edit, told):
    with_layer(tmp_path / "model", DENSE)
    change(tmp_path / "model", edit)
    with pytest.raises(CheckpointError, match=told):
        pretrained.load_mtp(tmp_path / "model")


def test_models_without_one_are_refused():
    with pytest.raises(CheckpointError, match=r"no tensor is named mtp\.\*; releases"):
        pretrained.load_mtp(FIXTURES / DENSE)
    with pytest.raises(CheckpointError, match="alone; got a llama"):
        pretrained.load_mtp(FIXTURES / "llama_mha")
