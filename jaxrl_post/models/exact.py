"""A forward pass whose bits for a token depend on its path alone.

Sampler and trainer compute a token in other batches, rows and programs, and a compiler
may sum in another order in each. Here all that is done to a token is done in tiles of a
fixed size (`kernels.row_tiles`), attention reads a path in fixed blocks
(`kernels.attention.paths`), and the parts of devices that split a product are added in
the devices' order. So both give the same bits. There is no derivative: the trainer
takes the values from here and the gradient from `forward`.

On a mesh every device computes its own tokens; weights that are split along the batch's
axes are gathered, those of heads, MLP and vocabulary stay split.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.attention.paths import (
    BLOCK,
    Settings,
    Tasks,
    attend_paths,
    queries_per_task,
)
from jaxrl_post.kernels.row_tiles import CountedRows, map_tiles
from jaxrl_post.models.attention import Context, query_key_value
from jaxrl_post.models.cache import KVCache, LayerCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.experts import partial_mixture
from jaxrl_post.models.layers import add_bias, embed, gated, norm, project
from jaxrl_post.models.matrix import part_axes
from jaxrl_post.models.params import DecoderParams, LayerParams, MLPParams, param_specs
from jaxrl_post.models.rope import rope_tables
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, partition_spec
from jaxrl_post.types import Array, Bool, Float, Int, previous_tokens

__all__ = ["check_exact", "exact_forward"]

# Logical axes along which a device keeps its part of a weight.
SPLIT = ("heads", "kv_heads", "ffn", "expert_ffn", "vocab")


def check_exact(config: ModelConfig, parts: int) -> None:
    """Refuses models for which sampler and trainer cannot agree to the last bit.

    Args:
        config: the model's config.
        parts: devices that split the heads.

    Raises:
        ValueError: says what stands in the way.
    """
    scaling = config.rope_scaling
    if config.latent is not None:
        raise ValueError(
            f"{config.model_type} has latent attention, which trains and decodes by "
            "different products"
        )
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_scaling of the kind {scaling.kind} rotates a token by the length of "
            "its sequence, which the sampler does not know yet"
        )
    specs = param_specs(config).layers[0].attention
    joint = getattr(specs, "query_norm", None)
    if parts > 1 and joint is not None and len(joint.shape) > 1:
        raise ValueError(
            f"{config.model_type} norms all heads together, and {parts} devices split "
            "them; use a mesh without tp"
        )


class _Split(NamedTuple):
    """Mesh axes of a `shard_map`, () where nothing is split.

    Attributes:
        batch: axes that split the tokens.
        heads: axes that split the query heads.
        kv_heads: axes that split the key/value heads; () if all devices have them all.
        ffn: axes that split dense MLPs.
        expert_ffn: axes that split experts.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    ffn: tuple[str, ...] = ()
    expert_ffn: tuple[str, ...] = ()


def exact_forward(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"],
    *,
    positions: Int[Array, "batch length"],
    counted: Bool[Array, "batch length"],
    ends: Int[Array, "batch length"] | None = None,
    cache: KVCache | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[Float[Array, "batch length hidden"], KVCache | None]:
    """Maps tokens to final hidden states, as `forward` does up to rounding.

    Args:
        params: parameters in the compute dtype.
        config: static; see `check_exact`.
        tokens: int32.
        positions: int32, along the tokens' paths.
        counted: False for tokens that are not computed, such as padding.
        ends: as in `forward`, for packed rows; a counted token's path is counted.
        cache: for rows that go on with a sequence: entry p of a row is the token at
            position p. Its length is a multiple of BLOCK, and it shares nothing.
        rules: as in `forward`.

    Returns:
        Hidden states, 0 where not counted, and the cache with these tokens.
    """
    hidden = embed(config, params.embedding, tokens.reshape(-1), rules)
    hidden = hidden.reshape(*tokens.shape, -1)
    weights = params.layers, params.final_norm
    mesh = jax.sharding.get_abstract_mesh()
    arrays = (hidden, positions, counted, ends, cache)
    if mesh.empty or mesh.size == 1:
        return _local(config, _Split(), weights, *arrays)
    split = _Split(
        batch=dividing_axes("batch", tokens.shape[0], mesh, rules),
        heads=dividing_axes("heads", config.num_heads, mesh, rules),
        kv_heads=dividing_axes("kv_heads", config.cache_shape[0], mesh, rules),
        ffn=dividing_axes("ffn", config.intermediate_size, mesh, rules),
        expert_ffn=()
        if config.experts is None
        else dividing_axes("expert_ffn", config.experts.expert_size, mesh, rules),
    )
    of_rows = P(split.batch)
    of_cache = jax.tree.map(lambda _: P(split.batch, split.kv_heads), cache)
    specs = param_specs(config)
    return jax.shard_map(
        functools.partial(_local, config, split),
        in_specs=(
            _weight_specs(weights, (specs.layers, specs.final_norm), mesh, rules),
            of_rows,
            of_rows,
            of_rows,
            of_rows,
            of_cache,
        ),
        out_specs=(of_rows, of_cache),
        check_vma=False,
    )(weights, *arrays)


def _weight_specs(weights: Any, specs: Any, mesh: Any, rules: Rules) -> Any:
    """PartitionSpecs of parameters, split along the axes of SPLIT alone."""

    def one(spec: Any, weight: Any) -> Any:
        axes = tuple(axis if axis in SPLIT else None for axis in spec.axes)
        return jax.tree.map(
            lambda part, axes: partition_spec(part.shape, axes, mesh, rules),
            weight,
            part_axes(weight, axes),
        )

    return jax.tree.map(one, specs, weights, is_leaf=is_spec)


def _local(
    config: ModelConfig,
    split: _Split,
    weights: tuple[Sequence[LayerParams[Array]], Array],
    hidden: Array,
    positions: Array,
    counted: Array,
    ends: Array | None,
    cache: KVCache | None,
) -> tuple[Array, KVCache | None]:
    """The forward pass of a device's tokens."""
    layers, final_norm = weights
    shape = positions.shape
    rows = CountedRows.of(counted.reshape(-1))
    paths = _Paths.of(positions, counted, ends, rows)
    states = rows.take(hidden.reshape(-1, hidden.shape[-1]))
    at = rows.take(positions.reshape(-1))
    entries: list[LayerCache] = []
    for index, layer in enumerate(layers):
        query, key, value = map_tiles(
            functools.partial(_projected, config, index, layer),
            [states, at],
            rows.count,
        )
        attended, entry = _attended(
            config, index, layer, split, paths, rows, query, key, value,
            None if cache is None else cache.layer(index), positions,
        )  # fmt: skip
        if entry is not None:
            entries.append(entry)
        parts = _parts(
            map_tiles(functools.partial(_mixed, layer), [attended], rows.count),
            split.heads,
        )
        states, part = map_tiles(
            functools.partial(_branched, config, index, layer, split),
            [states, *parts],
            rows.count,
        )
        experts = config.layer_experts(index) is not None
        parts = _parts(part, split.expert_ffn if experts else split.ffn)
        states = map_tiles(
            functools.partial(_added, config, layer), [states, *parts], rows.count
        )
    states = map_tiles(
        lambda states: norm(config, states, final_norm), [states], rows.count
    )
    out = rows.put(states).reshape(*shape, -1)
    return out, None if cache is None else cache.with_layers(entries)  # type: ignore[return-value]


def _parts(part: Array, axes: tuple[str, ...]) -> list[Array]:
    """The parts of a sum that devices hold, in the devices' order.

    An all-reduce may add them in another order for other shapes.
    """
    return list(jax.lax.all_gather(part, axes)) if axes else [part]


def _total(parts: Sequence[Array]) -> Array:
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total.astype(parts[0].dtype)


def _normed(config: ModelConfig, x: Array, weight: Array | None) -> Array:
    return x if weight is None else norm(config, x, weight)


def _residual(
    config: ModelConfig, hidden: Array, branch: Array, weight: Array | None
) -> Array:
    branch = _normed(config, branch, weight)
    if config.residual_scale != 1.0:
        branch = branch * jnp.asarray(config.residual_scale, branch.dtype)
    return hidden + branch


def _projected(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    hidden: Array,
    positions: Array,
) -> tuple[Array, Array, Array]:
    """Queries, keys and values of a tile, [TILE, heads, head_dim] each."""
    window, at = config.window(index), positions[None]
    tables = None
    if index not in config.unrotated_layers:
        local = window is not None and config.local_rope_theta is not None
        tables = rope_tables(config, at, local=local)
    context = Context(at, None, None, tables, window, None)
    x = _normed(config, hidden, params.attention_norm)
    found = query_key_value(config, params.attention, x, context)  # type: ignore[arg-type]
    return tuple(heads[0] for heads in found)  # type: ignore[return-value]


def _mixed(params: LayerParams[Array], attended: Array) -> Array:
    """This device's part of the output of attention."""
    flat = attended.reshape(attended.shape[0], -1)
    return project(flat, params.attention.output, inputs=2)


def _branched(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    split: _Split,
    hidden: Array,
    *parts: Array,
) -> tuple[Array, Array]:
    """Adds attention; returns the states and this device's part of the MLP."""
    branch, bias = _total(parts), params.attention.output_bias
    branch = branch if bias is None else add_bias(branch, bias)
    hidden = _residual(config, hidden, branch, params.attention_post_norm)
    x = _normed(config, hidden, params.mlp_norm)
    experts = config.layer_experts(index)
    if params.experts is not None and experts is not None:
        shared = params.experts.shared
        part = partial_mixture(config, experts, params.experts, x, split.expert_ffn)
        if shared is not None:
            own = _partial_mlp(config, shared, x)
            if params.experts.shared_gate is not None:
                gate = project(x, params.experts.shared_gate.T)
                own = own * jax.nn.sigmoid(gate)
            part = part + own
    else:
        assert params.mlp is not None
        part = _partial_mlp(config, params.mlp, x)
    return hidden, part


def _partial_mlp(config: ModelConfig, params: MLPParams[Array], x: Array) -> Array:
    """This device's part of an MLP, without the last bias."""
    gate = project(x, params.gate, params.gate_bias)
    up = project(x, params.up, params.up_bias)
    return project(gated(config.activation, gate, up), params.down)


def _added(
    config: ModelConfig, params: LayerParams[Array], hidden: Array, *parts: Array
) -> Array:
    """Adds the MLP or the experts."""
    branch = _total(parts)
    mlp = params.mlp if params.experts is None else params.experts.shared
    if mlp is not None and mlp.down_bias is not None:
        branch = add_bias(branch, mlp.down_bias)
    return _residual(config, hidden, branch, params.mlp_post_norm)


class _Paths(NamedTuple):
    """The paths of a device's tokens, numbered over all its rows of the batch.

    Tokens that follow each other on a path form a run; a token of a run has a place in
    it, and a run follows a token, which lies in another one.

    Attributes:
        starts: int32 [tokens], first token of each token's run.
        positions: int32 [tokens], along the path.
        parents: int32 [tokens], the token before each first token of a run.
        counted: bool [tokens].
        places: int32 [tokens], the row that holds the token's states.
        length: tokens of a row of the batch.
    """

    starts: Array
    positions: Array
    parents: Array
    counted: Array
    places: Array
    length: int

    @classmethod
    def of(
        cls, positions: Array, counted: Array, ends: Array | None, rows: CountedRows
    ) -> "_Paths":
        batch, length = positions.shape
        index = jnp.arange(length, dtype=jnp.int32)
        first = index[None] == 0
        parents = jnp.zeros((batch, length), jnp.int32)
        if ends is not None:
            before = jnp.roll(ends, 1, axis=1)
            first = first | (before <= index)
            parents = previous_tokens(ends)
        starts = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
        offset = length * jnp.arange(batch, dtype=jnp.int32)[:, None]
        return cls(
            (jnp.broadcast_to(starts, (batch, length)) + offset).reshape(-1),
            positions.reshape(-1),
            (parents + offset).reshape(-1),
            counted.reshape(-1),
            rows.places,
            length,
        )

    def tasks(self, group: int, rows: int) -> tuple[Tasks, Array]:
        """Groups the queries of runs; also returns the last token of each task."""
        tokens, size = self.starts.shape[0], queries_per_task(group)
        index = jnp.arange(tokens, dtype=jnp.int32)
        begins = self.counted & ((index - self.starts) % size == 0)
        order = jnp.argsort(~begins, stable=True).astype(jnp.int32)
        members = order[:, None] + jnp.arange(size, dtype=jnp.int32)
        inside = members < tokens
        members = jnp.minimum(members, tokens - 1)
        inside &= self.starts[members] == self.starts[order][:, None]
        inside &= self.counted[members]
        last = jnp.where(inside, members, 0).max(axis=1)
        tasks = Tasks(
            jnp.where(inside, self.places[members], rows),
            jnp.where(inside, self.positions[members], -1),
            begins.sum(dtype=jnp.int32),
        )
        return tasks, last

    def find(self, last: Array, block: Array) -> Array:
        """The rows of the tokens of a block of the paths that end with `last`.

        Args:
            last: int32 [n], tokens.
            block: int32, number of the block.

        Returns:
            int32 [n, BLOCK]; any row for positions beyond `last`.
        """
        wanted = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        found = jnp.broadcast_to(last[:, None], (last.shape[0], BLOCK))

        def start_of(token: Array) -> Array:
            return self.positions[self.starts[token]]

        def climb(state: tuple[Array, Array]) -> tuple[Array, Array]:
            steps, token = state
            earlier = start_of(token) > wanted
            return steps + 1, jnp.where(
                earlier, self.parents[self.starts[token]], token
            )

        def higher(state: tuple[Array, Array]) -> Array:
            # A path has at most so many runs as tokens; the bound ends the loop for
            # rows that are no forest.
            return (state[0] < self.length) & (start_of(state[1]) > wanted).any()

        _, found = jax.lax.while_loop(higher, climb, (jnp.int32(0), found))
        tokens = self.starts[found] + wanted - start_of(found)
        tokens = jnp.clip(tokens, 0, self.starts.shape[0] - 1)
        return self.places[tokens]


def _attended(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    split: _Split,
    paths: _Paths,
    rows: CountedRows,
    query: Array,
    key: Array,
    value: Array,
    entry: LayerCache | None,
    positions: Array,
) -> tuple[Array, LayerCache | None]:
    """Attention of all tokens, over their paths in the batch or over the cache."""
    heads, kv_heads = query.shape[1], key.shape[1]
    read, num_read = _read_heads(config, split, heads, kv_heads)
    tasks, last = paths.tasks(heads // num_read, query.shape[0])
    sinks = getattr(params.attention, "sinks", None)
    scale = config.score_scale
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window, cap = config.window(index), config.attention_softcap
    settings = Settings(float(scale), window, cap)
    if entry is None:

        def fetch(numbers: Array, block: Array) -> tuple[Array, Array]:
            chosen = paths.find(last[numbers], block)
            return tuple(  # type: ignore[return-value]
                array.at[chosen].get(mode="clip")[:, :, read].swapaxes(1, 2)
                for array in (key, value)
            )

    else:
        batch, length = positions.shape

        def of_batch(array: Array) -> Array:
            """[rows, heads, dim] as [batch, heads, length, dim]."""
            whole = rows.put(array).reshape(batch, length, *array.shape[1:])
            return whole.swapaxes(1, 2)

        counted = paths.counted.reshape(batch, length)
        # Tokens that are not counted are written nowhere.
        to = jnp.where(counted, positions, entry.keys.shape[2])
        entry = entry.write(of_batch(key), of_batch(value), to, kernels="xla")
        keys, values = entry.keys, entry.values
        # A cache of codes is refused with exact mode.
        assert isinstance(keys, Array)
        assert isinstance(values, Array)

        def fetch(numbers: Array, block: Array) -> tuple[Array, Array]:
            sequences = last[numbers] // length

            def one(array: Array) -> Array:
                shape = (1, array.shape[1], BLOCK, array.shape[3])
                found = jax.vmap(
                    lambda row: jax.lax.dynamic_slice(
                        array, (row, 0, block * BLOCK, 0), shape
                    )[0]
                )(sequences)
                return found[:, read]

            return one(keys), one(values)

    return attend_paths(settings, query, tasks, fetch, sinks), entry


def _read_heads(
    config: ModelConfig, split: _Split, heads: int, kv_heads: int
) -> tuple[slice | Array, int]:
    """Which of its key/value heads this device's query heads read, and how many."""
    if not split.heads or split.kv_heads:
        return slice(None), kv_heads
    # All key/value heads are on every device. If each group of query heads lies on one
    # device, or a device's heads are in one group, each is read once.
    group = config.num_heads // kv_heads
    first = jax.lax.axis_index(split.heads) * heads
    step = min(group, heads) if max(group, heads) % min(group, heads) == 0 else 1
    return (first + jnp.arange(0, heads, step, dtype=jnp.int32)) // group, heads // step
