"""Low-rank adapters: LoRA, rank-stabilised LoRA and DoRA.

An adapter is a separate tree with an entry for the path of every adapted matrix.
`adapted` combines adapter and base to a parameter tree for `forward`, which contains
the base's arrays without a copy. So the reference policy (the base alone) needs no
extra memory, and only the adapter needs gradients and optimizer state.

    adapted:  y = x W + scale (x A) B
    DoRA:     y = m / ||W + scale A B|| * (x W + scale (x A) B)

The product A B is as large as W and is never formed. In training, x before A may have
dropout (see `dropout`).

A parameter without pretrained values, such as a value head, is fully trained: the
adapter holds the parameter itself (see `whole`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.models.adapters.dora import column_norms
from jaxrl_post.models.adapters.dropout import Dropout
from jaxrl_post.models.adapters.whole import Whole, copies, whole_specs
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.matrix import (
    EXPERTS,
    INPUT_DIMS,
    Axes,
    Matrix,
    dense,
    expert_dims,
    grouped,
    input_dims,
    is_matrix,
    matrices,
    multiply,
    part_axes,
    path_name,
    target_name,
)
from jaxrl_post.models.params import DecoderParams, text_specs
from jaxrl_post.models.spec import ParamSpec, initialize, is_spec
from jaxrl_post.sharding import DEFAULT_RULES, Rules, named_shardings
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "Adapted",
    "Adapter",
    "LoRAConfig",
    "LoRAParams",
    "adaptable",
    "adapted",
    "adapter_specs",
    "check_adapter",
    "initialize_adapter",
    "merged",
]


@dataclass(frozen=True)
class LoRAConfig:
    """Hyperparameters of an adapter: its matrices, rank and scale.

    Attributes:
        rank: rank of A B, >= 1.
        alpha: A B is multiplied by alpha / rank; > 0.
        targets: names of the adapted matrices, in all layers that have them: query,
            key, value and output of attention; query_down, query_up, kv_down and kv_up
            of latent attention; input_gate, output_gate, inputs and outputs of short
            convolutions; delta_query, delta_key, delta_value, delta_output,
            delta_output_gate, delta_beta and delta_decay of gated delta nets;
            mamba_query, mamba_key, mamba_value, mamba_output, mamba_output_gate and
            mamba_step of Mamba-2; gate, up and down of dense and shared MLPs;
            per_layer_gate and per_layer_output of per-layer embeddings;
            expert_gate, expert_up and expert_down of routed experts, which are not
            adapted by default. See `adaptable`.
        rank_stabilized: A B is multiplied by alpha / sqrt(rank) instead.
        dora: magnitude and direction of each output are adapted separately.
        whole: paths of fully trained parameters, or of groups of them, such as
            "value_head"; adaptable matrices are not allowed.
        dropout: probability with which training drops an entry of x before A, in
            [0, 1).

    References:
        LoRA, arXiv:2106.09685; rank stabilisation, arXiv:2312.03732; DoRA,
        arXiv:2402.09353.

    >>> LoRAConfig(rank=16, alpha=32.0).scale
    2.0
    >>> LoRAConfig(rank=16, alpha=32.0, rank_stabilized=True).scale
    8.0
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (
        "query", "key", "value", "output", "gate", "up", "down",
    )  # fmt: skip
    rank_stabilized: bool = False
    dora: bool = False
    whole: tuple[str, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora: rank must be at least 1; got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora: alpha must be positive; got {self.alpha}")
        unknown = [name for name in self.targets if name not in INPUT_DIMS]
        if unknown or not self.targets:
            raise ValueError(
                f"lora: targets must be some of {', '.join(INPUT_DIMS)}; got "
                f"{', '.join(unknown) or 'none'}"
            )
        experts = [name for name in self.targets if name in EXPERTS]
        if self.dora and experts:
            raise ValueError(
                "lora: dora must be off where experts' own matrices are adapted, as in "
                f"PEFT; got the targets {', '.join(experts)}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora: dropout must be in [0, 1); got {self.dropout}")
        if self.dropout and experts:
            raise ValueError(
                "lora: dropout must be 0 where experts' own matrices are adapted, as "
                f"in PEFT; got {self.dropout} and the targets {', '.join(experts)}"
            )
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora: targets must differ from one another; got {self.targets}"
            )

    @property
    def scale(self) -> float:
        """Factor of A B."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@struct.dataclass
class LoRAParams[Leaf]:
    """The adapter of a matrix W [*inputs, *outputs]; for experts [experts] comes first.

    Attributes:
        down: A [*inputs, rank].
        up: B [rank, *outputs]; zeros at the start.
        magnitude: m [*outputs], float32; None without DoRA.
    """

    down: Leaf
    up: Leaf
    magnitude: Leaf | None = None


# The keys are paths of parameters, such as "layers.0.attention.query".
type Adapter[Leaf] = dict[str, LoRAParams[Leaf] | Whole[Leaf]]


@struct.dataclass
class Adapted:
    """An adapted matrix, a drop-in for W + scale A B.

    For routed experts the dim [experts] comes before all dims below.

    Attributes:
        base: W [*inputs, *outputs]: an array, a quantised matrix, or an adapted one.
        down: A [*inputs, rank].
        up: B [rank, *outputs].
        magnitude: m [*outputs], or None.
        scale: factor of A B.
        dropout: of x before A, in training; else None.
    """

    base: Any
    down: Float[Array, "..."]
    up: Float[Array, "..."]
    magnitude: Float[Array, "..."] | None
    scale: float = struct.field(pytree_node=False)
    dropout: Dropout | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The base's shape."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """Number of the base's dims."""
        return self.base.ndim

    @property
    def dtype(self) -> Any:
        """The base's dtype."""
        return self.base.dtype

    def multiply(self, x: Float[Array, "tokens inner"], inputs: int) -> Array:
        """Returns x (W + scale A B), rescaled with DoRA, in x's dtype."""
        dtype = x.dtype
        seen = x if self.dropout is None else self.dropout.of(x)
        low = multiply(seen, self.down.astype(dtype), inputs) * self.scale
        product = multiply(x, self.base, inputs) + multiply(low, self.up.astype(dtype))
        if self.magnitude is None:
            return product
        norms = column_norms(self.base, self.down, self.up, self.scale, dtype)
        factor = (self.magnitude / norms).reshape(-1)
        # In float32, because bfloat16 would lose changes of m below one part in 256.
        return (product.astype(jnp.float32) * factor).astype(dtype)

    def grouped(
        self, x: Float[Array, "rows inner"], sizes: Int[Array, " experts"]
    ) -> Array:
        """Returns x (W + scale A B) with the matrix of each row's expert."""
        low = grouped(x, self.down.astype(x.dtype), sizes) * self.scale
        change = grouped(low, self.up.astype(x.dtype), sizes)
        return grouped(x, self.base, sizes) + change

    def part_axes(self, axes: Axes) -> "Adapted":
        """Replaces the arrays by their axes; the rank has no axis."""
        # A and B of routed experts both number the experts.
        experts = self.down.ndim + self.up.ndim - 2 - self.ndim
        first = axes[:experts]
        inputs, outputs = axes[experts : self.down.ndim - 1], axes[self.down.ndim - 1 :]
        return self.replace(  # type: ignore[attr-defined]
            base=part_axes(self.base, axes),
            down=(*first, *inputs, None),
            up=(*first, None, *outputs),
            magnitude=None if self.magnitude is None else outputs,
        )

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Returns W + scale A B, rescaled with DoRA, summed in float32."""
        down, up = self.down.astype(jnp.float32), self.up.astype(jnp.float32)
        if down.ndim + up.ndim - 2 > self.ndim:  # A and B both number the experts.
            change = jnp.matmul(down, up, precision="highest")
        else:
            change = jnp.tensordot(down, up, axes=1, precision="highest")
        whole = dense(self.base, jnp.float32) + self.scale * change
        if self.magnitude is not None:
            inputs = tuple(range(self.down.ndim - 1))
            norms = jnp.sqrt(jnp.sum(jnp.square(whole), axis=inputs))
            whole = whole * (self.magnitude / jax.lax.stop_gradient(norms))
        return whole.astype(dtype)


def adaptable(config: ModelConfig, *, dora: bool = False) -> tuple[str, ...]:
    """Returns the names of the model's matrices that `targets` may contain.

    With DoRA, routed experts are excluded.

    >>> from jaxrl_post.models import MixtureOfExperts
    >>> adaptable(ModelConfig("mixtral", 32, 16, 24, 1, num_heads=2, num_kv_heads=1,
    ...                       experts=MixtureOfExperts(4, 2, 24)))
    ('query', 'key', 'value', 'output', 'expert_gate', 'expert_up', 'expert_down')
    """
    names = dict.fromkeys(map(target_name, matrices(text_specs(config))))
    return tuple(name for name in names if not (dora and name in EXPERTS))


def adapter_specs(config: ModelConfig, lora: LoRAConfig) -> Adapter[ParamSpec]:
    """Returns the adapter's shapes, logical axes and initialisers.

    A is drawn from a normal distribution with variance 1 / (3 inputs), the variance of
    PEFT's uniform distribution (Kaiming with a = sqrt(5)); B is zero. The axes are the
    matrix's axes and "rank". Fully trained parameters keep their axes.

    Raises:
        ValueError: no layer of the model has a target; a path in `whole` is no
            parameter of the model, or an adaptable matrix.

    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1,
    ...                      head="value")
    >>> lora = LoRAConfig(rank=4, targets=("output",), whole=("value_head",))
    >>> specs = adapter_specs(config, lora)
    >>> specs["layers.0.attention.output"].down.shape
    (2, 8, 4)
    >>> specs["value_head"].weight.shape
    (1, 16)
    """
    known = adaptable(config)
    missing = [target for target in lora.targets if target not in known]
    if missing:
        raise ValueError(
            f"lora: no layer of this {config.model_type} has a matrix "
            f"{', '.join(missing)}; targets may be {', '.join(known)}"
        )
    low_rank = {
        path: _spec(spec, path, lora)
        for path, spec in matrices(text_specs(config)).items()
        if target_name(path) in lora.targets
    }
    return low_rank | whole_specs(config, lora.whole)


def _spec(base: ParamSpec, path: str, lora: LoRAConfig) -> LoRAParams[ParamSpec]:
    first, inputs = expert_dims(path), input_dims(path)

    def parted[Each](dims: tuple[Each, ...]) -> tuple[tuple[Each, ...], ...]:
        """Splits dims into experts, inputs and outputs."""
        return dims[:first], dims[first : first + inputs], dims[first + inputs :]

    each, into, out = parted(base.shape)
    by_expert, from_axes, to_axes = parted(base.axes)
    return LoRAParams(
        down=ParamSpec(
            (*each, *into, lora.rank),
            (*by_expert, *from_axes, "rank"),
            scale=(3 * math.prod(into)) ** -0.5,
        ),
        up=ParamSpec(
            (*each, lora.rank, *out),
            (*by_expert, "rank", *to_axes),
            init="zeros",
            decay=True,
        ),
        magnitude=(
            ParamSpec(out, to_axes, init="ones", wide=True) if lora.dora else None
        ),
    )


def initialize_adapter(
    key: Array,
    params: DecoderParams[Any],
    config: ModelConfig,
    lora: LoRAConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Adapter[Array]:
    """Draws an adapter that does not change the base yet; copies `lora.whole`.

    A new LoRA adapter gives the base's outputs bit for bit, DoRA up to the rounding of
    m divided by the norms, which are equal at the start.

    Args:
        key: a PRNG key; a matrix's values depend on the key and its path alone.
        params: the base; DoRA reads its norms.
        config: the model's config.
        lora: the adapter's config.
        dtype: dtype of A and B; products use the activations' dtype in any case. Fully
            trained parameters are float32.
        mesh: mesh of the adapter; None lets JAX place it.
        rules: mesh axes of every logical axis.

    Raises:
        ValueError: as `adapter_specs`.

    >>> from jaxrl_post.models import initialize, param_specs
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> params = initialize(jax.random.key(0), param_specs(config))
    >>> lora = LoRAConfig(rank=4, targets=("query", "value"))
    >>> adapter = initialize_adapter(jax.random.key(1), params, config, lora)
    >>> list(adapter)
    ['layers.0.attention.query', 'layers.0.attention.value']
    >>> policy = adapted(params, adapter, config, lora)
    >>> policy.layers[0].attention.query.base is params.layers[0].attention.query
    True
    """
    specs = adapter_specs(config, lora)
    low_rank = {p: spec for p, spec in specs.items() if isinstance(spec, LoRAParams)}
    whole = {p: spec for p, spec in specs.items() if isinstance(spec, Whole)}
    adapter = initialize(key, low_rank, dtype, mesh, rules)
    if lora.dora:
        adapter = _scaled(adapter, low_rank, params, lora, mesh, rules)
    return adapter | copies(whole, params, mesh, rules)


def _scaled(
    adapter: dict[str, LoRAParams[Array]],
    specs: dict[str, LoRAParams[ParamSpec]],
    params: DecoderParams[Any],
    lora: LoRAConfig,
    mesh: Mesh | None,
    rules: Rules,
) -> dict[str, LoRAParams[Array]]:
    """Sets the magnitudes to the column norms of the base."""

    def norms(
        bases: dict[str, Any], adapter: dict[str, LoRAParams[Array]]
    ) -> dict[str, Array]:
        return {
            path: column_norms(
                bases[path], own.down, own.up, lora.scale, bases[path].dtype
            )
            for path, own in adapter.items()
        }

    bases = {path: base for path, base in matrices(params).items() if path in specs}
    magnitudes = {path: spec.magnitude for path, spec in specs.items()}
    shardings = None if mesh is None else named_shardings(magnitudes, mesh, rules)
    found = jax.jit(norms, out_shardings=shardings)(bases, adapter)
    return {
        path: own.replace(magnitude=found[path])  # type: ignore[attr-defined]
        for path, own in adapter.items()
    }


def adapted(
    params: DecoderParams[Any],
    adapter: Adapter[Array],
    config: ModelConfig,
    lora: LoRAConfig,
    dropout: Dropout | None = None,
) -> DecoderParams[Any]:
    """Combines base and adapter to a parameter tree, without copying the base.

    Differentiate with respect to `adapter`, so that the base needs no gradient.

    Args:
        params: the base, of arrays or quantised.
        adapter: an adapter from `initialize_adapter` or `load_adapter`.
        config: the model's config.
        lora: the adapter's config.
        dropout: in training with dropout; each matrix gets a key of its own.

    Returns:
        The tree for `forward`, in which `Adapted` replaces the targets. Fully trained
        parameters are cast to the base's dtype, like master weights.

    Raises:
        ValueError: the adapter does not fit `config` and `lora`.
    """
    check_adapter(adapter, config, lora)

    def change(path: str, leaf: Any) -> Any:
        own = adapter.get(path)
        if own is None:
            return leaf
        if isinstance(own, Whole):
            return own.weight.astype(leaf.dtype)
        drop = None if dropout is None else dropout.folded(path)
        return Adapted(
            leaf, own.down, own.up, own.magnitude, scale=lora.scale, dropout=drop
        )

    return _with_paths(change, params)


def merged(
    params: DecoderParams[Any],
    adapter: Adapter[Array],
    config: ModelConfig,
    lora: LoRAConfig,
) -> DecoderParams[Array]:
    """Merges an adapter into its base and returns plain parameters.

    Sums are rounded once, to the base's dtype; bfloat16 may lose small changes, which
    the separate adapter keeps. Quantised matrices become dense.

    Args:
        params: the base, arrays or quantised, in any sharding, which the result keeps.
        adapter: the adapter.
        config: the model's config.
        lora: the adapter's config.

    Raises:
        ValueError: the adapter does not fit `config` and `lora`.
    """
    policy = adapted(params, adapter, config, lora)
    return jax.tree.map(
        lambda leaf: _plain(leaf) if is_matrix(leaf) else leaf,
        policy,
        is_leaf=is_matrix,
    )


@jax.jit
def _plain(matrix: Matrix) -> Array:
    return matrix.dense(matrix.dtype)


def check_adapter(
    adapter: Adapter[Array], config: ModelConfig, lora: LoRAConfig
) -> None:
    """Checks the paths and shapes of an adapter against its configs.

    Raises:
        ValueError: the adapter does not fit; the message names the first matrix.
    """
    specs = adapter_specs(config, lora)
    if specs.keys() != adapter.keys():
        first = min(specs.keys() ^ adapter.keys())
        lacks = "lacks" if first in specs else "has, but lora does not target,"
        raise ValueError(
            f"adapter: {lacks} {first}; it was made for other targets or layers than "
            f"{config.model_type} with targets {', '.join(lora.targets + lora.whole)}"
        )
    expected = jax.tree.map(lambda spec: spec.shape, specs, is_leaf=is_spec)
    for path, own in adapter.items():
        for name, shape in vars(expected[path]).items():
            found = getattr(getattr(own, name, None), "shape", None)
            if found != shape:
                raise ValueError(
                    f"adapter: {path}.{name} must have shape {shape} with rank "
                    f"{lora.rank} and dora={lora.dora}; got {found}"
                )


def _with_paths(change: Callable[[str, Any], Any], params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(path_name(path), leaf), params, is_leaf=is_matrix
    )
