"""A table of everything that takes memory on a device, from arrays or from shapes."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.learner.model import Model
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.decoder import Remat
from jaxrl_post.sharding import per_device_bytes, split_size
from jaxrl_post.types import PyTree

__all__ = [
    "MemoryTable",
    "SamplerMemory",
    "activation_bytes",
    "gradient_bytes",
    "layout_table",
]

# Rows (what, layout, MiB per device).
type MemoryTable = list[tuple[str, str, str]]


@dataclass(frozen=True)
class SamplerMemory:
    """Arrays that a sampler keeps in memory.

    Attributes:
        cache: keys and values.
        draft: the draft model's parameters and cache; None without one.
        copies: its own copy of the parameters, if it has one.
        mesh: on which the copy is.
    """

    cache: PyTree | None = None
    draft: PyTree | None = None
    copies: PyTree | None = None
    mesh: Mesh | None = None


def layout_table(
    model: Model,
    update: UpdateConfig,
    *,
    rows: int,
    row_tokens: int,
    optimizer: PyTree,
    reference: PyTree | None = None,
    companions: Mapping[str, PyTree] = {},
    judge: PyTree | None = None,
    sampler: SamplerMemory = SamplerMemory(),
) -> MemoryTable:
    """Tells everything that takes memory.

    Activations are an estimate, of `rows` rows of `row_tokens` tokens; the rest is
    exact, of arrays and of ShapeDtypeStructs. Shared arrays, such as a base under two
    adapters, count once, in the first row.

    Args:
        model: to train, perhaps abstract.
        update: has the size of a microbatch and what a layer keeps.
        rows: of a microbatch.
        row_tokens: tokens of a row.
        optimizer: moments and master weights of the trained parameters.
        reference: parameters of the reference or teacher.
        companions: parameters, base and optimizer of each model that is trained next to
            the policy, by name.
        judge: parameters of the reward model.
        sampler: what the sampler keeps.
    """
    adaptation = model.adaptation
    frozen = "" if adaptation is None else ", frozen"
    parts = [
        ("parameters", f"{model.num_parameters:,} {model.dtype}{frozen}", model.base),
        ("adapter", "trained", None if adaptation is None else model.params),
        ("optimizer", "moments and master weights", optimizer),
        ("reference", "parameters, not trained", reference),
        *((name, "parameters and optimizer", own) for name, own in companions.items()),
        ("reward model", "frozen parameters", judge),
        ("sampler's copy", f"on {_axes(sampler.mesh or model.mesh)}", sampler.copies),
        ("KV cache", "of all slots", sampler.cache),
        ("draft model", "parameters and KV cache", sampler.draft),
    ]
    table, known = [("mesh", _axes(model.mesh), "")], set[int]()
    for name, what, tree in parts:
        leaves = [leaf for leaf in jax.tree.leaves(tree) if id(leaf) not in known]
        known.update(map(id, leaves))
        if leaves:
            table.append((name, what, f"{per_device_bytes(leaves) / 2**20:,.1f}"))
    rules = model.rules.with_context_as_batch()
    row = f"{rows} rows" if rows > 1 else "1 row"
    shape = f"estimate: {row} of {row_tokens} tokens, remat {update.remat}"
    sums, kept = (
        f"{size / 2**20:,.1f}"
        for size in (
            gradient_bytes(model.params),
            activation_bytes(
                model.config,
                model.mesh,
                tokens=rows * row_tokens // split_size("batch", model.mesh, rules),
                remat=update.remat,
                itemsize=model.dtype.itemsize,
            ),
        )
    )
    table.append(("gradients", "float32 sums, and a microbatch's", sums))
    table.append(("activations", shape, kept))
    return table


def _axes(mesh: Mesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def gradient_bytes(params: PyTree) -> int:
    """Bytes of the summed gradients, and of a microbatch's own in the params' dtype.

    Args:
        params: trained parameters, arrays or ShapeDtypeStructs with shardings.
    """
    return sum(
        per_device_bytes([leaf]) * (4 + leaf.dtype.itemsize) // leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params)
    )


def activation_bytes(
    config: ModelConfig, mesh: Mesh, *, tokens: int, remat: Remat, itemsize: int
) -> int:
    """Bytes that all layers keep for the backward pass, and one layer's own pass.

    Args:
        config: the model's config.
        mesh: the trainer's mesh; only its shape is used.
        tokens: of a microbatch, on a device.
        remat: what a layer keeps.
        itemsize: bytes of an activation.
    """
    hidden, inner, tp = config.hidden_size, config.intermediate_size, mesh.shape["tp"]
    # The widest layer stands for all.
    wide = [config.heads(layer) for layer in range(config.num_layers)]
    inner *= max(config.layer(i).mlp_multiple for i in range(config.num_layers))
    heads = config.num_heads * max(own.head_dim for own in wide)
    entries = max(own.num_kv_heads * own.head_dim for own in wide)
    # A layer reads its per-layer embeddings, which are made before the first layer.
    tables = 0 if config.per_layer is None else config.per_layer.size
    # By XLA's count of temporary buffers; scores are computed tile by tile, twice.
    layer = tables + 7 * hidden + (4 * heads + 4 * entries + 5 * inner) // tp
    kept = {
        "full": tables + hidden,
        "dots": tables + 3 * hidden + (heads + 2 * entries + 2 * inner) // tp,
        "none": layer,
    }[remat]
    working = 0 if remat == "none" else layer
    return tokens * (kept * config.num_layers + working) * itemsize
