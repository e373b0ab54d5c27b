"""A family that no decoder belongs to, with every kind of place that weights have."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.spec import ParamSpec, is_spec
from jaxrl_post.pretrained.layout import Weight
from jaxrl_post.pretrained.name_map import entries_of, paths
from jaxrl_post.sharding import named_shardings

WIDE = "experts expert_embed expert_ffn"
GATE_UP = "model.layers.*.experts.gate_up_proj"
WEIGHTS = {
    "embedding": Weight("model.embed_tokens.weight", "vocab embed"),
    "layers.*.query": Weight(
        "model.layers.*.qkv_proj.weight", "(heads head_dim) embed", part=0
    ),
    "layers.*.key": Weight(
        "model.layers.*.qkv_proj.weight", "(kv_heads head_dim) embed", part=1
    ),
    "layers.*.value": Weight(
        "model.layers.*.qkv_proj.weight", "(kv_heads head_dim) embed", part=2
    ),
    "layers.*.key_bias": Weight("model.layers.*.k_proj.bias", "(kv_heads head_dim)"),
    "layers.*.up": Weight(
        "model.layers.*.mlp.experts.%.up_proj.weight", "expert_ffn expert_embed"
    ),
    "layers.*.down": Weight(
        "model.layers.*.mlp.experts.%.down_proj.weight", "expert_embed expert_ffn"
    ),
    "layers.*.gate": Weight(GATE_UP, WIDE, part=0, join="interleave", dim=-1),
    "layers.*.lift": Weight(GATE_UP, WIDE, part=1, join="interleave", dim=-1),
}


def specs(*, vocab=16, embed=8, ffn=4, experts=4, heads=4, num_layers=2):
    """Shapes that eight devices divide in every way that the tests ask for."""
    wide = ParamSpec((experts, embed, ffn), tuple(WIDE.split()))
    kv = ParamSpec((embed, heads // 2, 2), ("embed", "kv_heads", "head_dim"))
    layer = {
        "query": ParamSpec((embed, heads, 2), ("embed", "heads", "head_dim")),
        "key": kv,
        "value": kv,
        "key_bias": None,
        "up": wide,
        "down": ParamSpec(
            (experts, ffn, embed), ("experts", "expert_ffn", "expert_embed")
        ),
        "gate": wide,
        "lift": wide,
    }
    embedding = ParamSpec((vocab, embed), ("vocab", "embed"))
    return {"embedding": embedding, "layers": (layer,) * num_layers}


def values(tree, dtype=np.float32, seed=0):
    """Random NumPy arrays in the shapes of specs."""
    rng = np.random.default_rng(seed)
    draw = lambda spec: rng.standard_normal(spec.shape, np.float32).astype(dtype)  # noqa: E731
    return jax.tree.map(draw, tree, is_leaf=is_spec)


def on_devices(tree, arrays, mesh=None, rules=None):
    """The arrays by path, as jax.Arrays."""
    if mesh is None:
        return {path: jnp.asarray(array) for path, array in paths(arrays).items()}
    shardings = shardings_of(tree, mesh, rules)
    return {
        path: jax.device_put(array, shardings[path])
        for path, array in paths(arrays).items()
    }


def shardings_of(tree, mesh, rules=None):
    """Shardings by path."""
    extra = () if rules is None else (rules,)
    return paths(named_shardings(tree, mesh, *extra))


def by_path(tree):
    """The entries of every parameter."""
    found = {}
    for entry in entries_of(WEIGHTS, tree):
        found.setdefault(entry.path, []).append(entry)
    return found
