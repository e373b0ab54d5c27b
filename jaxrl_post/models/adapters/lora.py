"""Low-rank adapters: LoRA, rank-stabilised LoRA and DoRA.

An adapter is a tree of its own, by the path of the matrix that it changes. `adapted`
lays it over the base: the result is a parameter tree like any other for `forward`,
with the very arrays of the base inside. So the base without the adapter, which is the
reference policy, costs nothing; and only the adapter needs gradients and optimizer
state.

    adapted:  y = x W + scale (x A) B
    DoRA:     y = m / ||W + scale A B|| * (x W + scale (x A) B)

The product A B is as large as W and is never formed.

A parameter that begins with nothing to adapt, such as a value head, is trained whole:
the adapter holds the parameter itself.
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
from jaxrl_post.models.params import DecoderParams, param_specs
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
    """Which matrices are adapted, and how.

    Attributes:
        rank: of the change, >= 1.
        alpha: the change is multiplied by alpha / rank; > 0.
        targets: names of matrices, in all layers that have them: query, key, value and
            output of attention; query_down, query_up, kv_down and kv_up of latent
            attention; gate, up and down of dense MLPs and of those that a mixture
            shares; expert_gate, expert_up and expert_down, experts' own, which are
            never adapted by default. See `adaptable`.
        rank_stabilized: the change is multiplied by alpha / sqrt(rank) instead.
        dora: magnitude and direction of each output are adapted separately.
        whole: paths of parameters, or of groups of them, that are trained whole, such
            as "value_head"; none that `targets` may name.

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
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora: targets must differ from one another; got {self.targets}"
            )

    @property
    def scale(self) -> float:
        """What the change is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@struct.dataclass
class LoRAParams[Leaf]:
    """The change of one matrix W [*inputs, *outputs]; of experts' own, of every one.

    Attributes:
        down: [*inputs, rank], A.
        up: [rank, *outputs], B; zeros at the start.
        magnitude: [*outputs], float32, m; None without DoRA.
    """

    down: Leaf
    up: Leaf
    magnitude: Leaf | None = None


# By the path of the parameter, such as "layers.0.attention.query".
type Adapter[Leaf] = dict[str, LoRAParams[Leaf] | Whole[Leaf]]


@struct.dataclass
class Adapted:
    """A matrix and its change, which multiplies as their sum would.

    Of experts' own every expert has a change; [experts] then goes before all of these.

    Attributes:
        base: W [*inputs, *outputs]: an array, a quantised matrix, or an adapted one.
        down: A [*inputs, rank].
        up: B [rank, *outputs].
        magnitude: m [*outputs], or None.
        scale: of A B.
    """

    base: Any
    down: Float[Array, "..."]
    up: Float[Array, "..."]
    magnitude: Float[Array, "..."] | None
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the base."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """Number of the base's dims."""
        return self.base.ndim

    @property
    def dtype(self) -> Any:
        """Of the base."""
        return self.base.dtype

    def multiply(self, x: Float[Array, "tokens inner"], inputs: int) -> Array:
        """x (W + scale A B), or with DoRA its rescaling; in x's dtype."""
        dtype = x.dtype
        low = multiply(x, self.down.astype(dtype), inputs) * self.scale
        product = multiply(x, self.base, inputs) + multiply(low, self.up.astype(dtype))
        if self.magnitude is None:
            return product
        norms = column_norms(self.base, self.down, self.up, self.scale, dtype)
        factor = (self.magnitude / norms).reshape(-1)
        # In float32: in bfloat16 a change of m below one part in 256 would be lost.
        return (product.astype(jnp.float32) * factor).astype(dtype)

    def grouped(
        self, x: Float[Array, "rows inner"], sizes: Int[Array, " experts"]
    ) -> Array:
        """x (W + scale A B) with each row's expert's, in x's dtype."""
        low = grouped(x, self.down.astype(x.dtype), sizes) * self.scale
        change = grouped(low, self.up.astype(x.dtype), sizes)
        return grouped(x, self.base, sizes) + change

    def part_axes(self, axes: Axes) -> "Adapted":
        """Axes in the place of experts' own base, A and B; their rank has none."""
        experts, inputs, outputs = axes
        return self.replace(  # type: ignore[attr-defined]
            base=part_axes(self.base, axes),
            down=(experts, inputs, None),
            up=(experts, None, outputs),
        )

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """W + scale A B, or with DoRA its rescaling, summed in float32."""
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
    """Names of the matrices that some layer of the model has: all that `targets` may.

    With DoRA that is not experts' own.

    >>> from jaxrl_post.models import MixtureOfExperts
    >>> adaptable(ModelConfig("mixtral", 32, 16, 24, 1, num_heads=2, num_kv_heads=1,
    ...                       experts=MixtureOfExperts(4, 2, 24)))
    ('query', 'key', 'value', 'output', 'expert_gate', 'expert_up', 'expert_down')
    """
    names = dict.fromkeys(map(target_name, matrices(param_specs(config))))
    return tuple(name for name in names if not (dora and name in EXPERTS))


def adapter_specs(config: ModelConfig, lora: LoRAConfig) -> Adapter[ParamSpec]:
    """Returns the adapter's shapes, logical axes and initialisers.

    A is drawn from a normal distribution of variance 1 / (3 inputs), which is that of
    PEFT's uniform one (Kaiming with a = sqrt(5)); B is zero. Axes are those of the
    matrix, and "rank". What is trained whole has its own.

    Raises:
        ValueError: a target that no layer of the model has; a path to train whole that
            is none of the model's parameters, or is a matrix to adapt.

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
        for path, spec in matrices(param_specs(config)).items()
        if target_name(path) in lora.targets
    }
    return low_rank | whole_specs(config, lora.whole)


def _spec(base: ParamSpec, path: str, lora: LoRAConfig) -> LoRAParams[ParamSpec]:
    first, inputs = expert_dims(path), input_dims(path)

    def parted[Each](dims: tuple[Each, ...]) -> tuple[tuple[Each, ...], ...]:
        """Of the experts' number, the inputs and the outputs."""
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
    """Draws an adapter that changes nothing yet; what is trained whole is copied.

    LoRA then gives the base's numbers bit for bit, DoRA up to the rounding of m over
    the norms that it was set to.

    Args:
        key: a PRNG key; what is drawn for a matrix depends on it and on the path.
        params: the base, of which DoRA takes the norms.
        config: of the model.
        lora: of the adapter.
        dtype: of A and B; products are computed in the activations' dtype either way.
            What is trained whole is float32.
        mesh: where the adapter goes; None leaves that to JAX.
        rules: logical axis to mesh axes.

    Raises:
        ValueError: as `adapter_specs`.

    >>> from jaxrl_post.models import initialize
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
    """With the norms of the base as magnitudes."""

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
) -> DecoderParams[Any]:
    """Lays an adapter over a base; nothing is copied but what is trained whole.

    Differentiate with respect to `adapter`: the base then needs no gradient.

    Args:
        params: the base, of arrays or quantised.
        adapter: as `initialize_adapter` or `load_adapter` return it.
        config: of the model.
        lora: of the adapter.

    Returns:
        The tree for `forward`, with `Adapted` in the place of the targets. What is
        trained whole is cast to the base's dtype, as master weights are.

    Raises:
        ValueError: the adapter is not that of `config` and `lora`.
    """
    check_adapter(adapter, config, lora)

    def change(path: str, leaf: Any) -> Any:
        own = adapter.get(path)
        if own is None:
            return leaf
        if isinstance(own, Whole):
            return own.weight.astype(leaf.dtype)
        return Adapted(leaf, own.down, own.up, own.magnitude, scale=lora.scale)

    return _with_paths(change, params)


def merged(
    params: DecoderParams[Any],
    adapter: Adapter[Array],
    config: ModelConfig,
    lora: LoRAConfig,
) -> DecoderParams[Array]:
    """Returns plain parameters that are the base with the adapter's change in them.

    Sums are rounded once, to the base's dtype; in bfloat16 that may round a small
    change away, of which the adapter itself loses nothing. What was quantised is not
    any more.

    Args:
        params: the base, arrays or quantised, in any sharding, which the result keeps.
        adapter: of `config` and `lora`.
        config: of the model.
        lora: of the adapter.

    Raises:
        ValueError: the adapter is not that of `config` and `lora`.
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
    """Compares an adapter with what config and lora ask for.

    Raises:
        ValueError: they do not belong together; the message names the first matrix.
    """
    specs = adapter_specs(config, lora)
    if specs.keys() != adapter.keys():
        first = min(specs.keys() ^ adapter.keys())
        lacks = "lacks" if first in specs else "has, but lora does not target,"
        raise ValueError(
            f"adapter: {lacks} {first}; it was made for other targets or layers than "
            f"those of {config.model_type} with targets "
            f"{', '.join(lora.targets + lora.whole)}"
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
