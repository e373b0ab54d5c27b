"""Validation, sharding and the derivative of the fused token log-probability."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.dispatch import Implementation, choose
from jaxrl_post.kernels.token_logprob import xla
from jaxrl_post.kernels.token_logprob.counted import ByRow, Residuals
from jaxrl_post.kernels.token_logprob.reference import (
    MASKED,
    TokenLogprob,
    from_logits,
)
from jaxrl_post.kernels.token_logprob.rows import ExactLogits
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    Rules,
    TableSplit,
    on_parts,
    partition_spec,
)
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["Scaling", "TokenLogprob", "tile_rows", "token_logprob"]

# Bytes of one tile of float32 logits on one device.
TILE_BYTES = 64 * 2**20


class Scaling(NamedTuple):
    """Options of how products of hidden states and the unembedding become logits.

    Attributes:
        temperature: > 0; divides the logits.
        softcap: > 0, c in c tanh(logits / c), before the temperature (Gemma 2,
            arXiv:2408.00118); None for no cap.
        vocab_size: number of real rows of `unembedding`; the rest is padding. None: all
            are real.
        exact: the same logits, as exact mode computes them (`models.exact`). The
            bits of all values then depend on their row alone, and the implementation
            computes the derivative; "reference" means "xla".
    """

    temperature: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None
    exact: ExactLogits | None = None


UNSCALED = Scaling()


def token_logprob(
    hidden: Float[Array, "batch length hidden"],
    unembedding: Float[Array, "vocab hidden"],
    targets: Int[Array, "batch length"],
    *,
    mask: Bool[Array, "batch length"] | None = None,
    kept: Int[Array, "batch length kept"] | None = None,
    scaling: Scaling = UNSCALED,
    rules: Rules = DEFAULT_RULES,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> TokenLogprob:
    """log softmax(hidden unembedding^T / temperature)[target], without all the logits.

    Memory is one tile of logits, in both passes and between them ("xla"), or none
    ("pallas_tpu", which keeps tiles of logits in the chip's own memory), or the
    gradient of 128 MiB of logits in the backward pass ("pallas_gpu"). Work is
    proportional to the rows that `mask` keeps. Differentiable in `hidden` and
    `unembedding`, through all that is returned.

    Args:
        hidden: states that predict `targets`, any float dtype.
        unembedding: the same dtype.
        targets: int32 ids in [0, vocab_size).
        mask: rows to compute; the others give 0 and have no gradient. Default: all.
        kept: int32 ids of the tokens among which top-k, top-p or min-p drew the target,
            one of them; each once, padded with -1. Its log-prob is that among them,
            log p(target) - log(their mass). Without ids, or with None, it is that among
            all tokens, as the entropy always is.
        scaling: what becomes a logit of a product.
        rules: how batch and vocabulary are split over the mesh of `jax.set_mesh`.
        implementation: "auto" takes "pallas_tpu" on TPUs, "pallas_gpu" on Hopper GPUs
            for bfloat16 and a width that is a multiple of 64, and "xla" elsewhere;
            "reference" holds all logits.
        interpret: whether a Pallas kernel is interpreted, to debug it on any platform.

    Returns:
        Log-prob, entropy and log-normaliser, float32 [batch, length], in nats.

    Raises:
        ValueError: the dtypes differ, the temperature or the softcap is not positive,
            `vocab_size` is out of its range, or leaves out rows of exact logits; or the
            implementation is unknown, does not run here or cannot compute this call.

    >>> import jax.numpy as jnp
    >>> h, w = jnp.zeros((1, 2, 3)), jnp.ones((4, 3))
    >>> token_logprob(h, w, jnp.zeros((1, 2), jnp.int32)).logprob  # -ln 4
    Array([[-1.3862944, -1.3862944]], dtype=float32)

    Of probabilities 0.5, 0.25 and twice 0.125 only the first two were kept:

    >>> h, w = jnp.ones((1, 1, 1)), jnp.log(jnp.array([[4.0], [2.0], [1.0], [1.0]]))
    >>> second = jnp.array([[1]], jnp.int32)
    >>> found = token_logprob(h, w, second, kept=jnp.array([[[0, 1, -1]]], jnp.int32))
    >>> round(math.exp(found.logprob.item()), 6)  # 0.25 / 0.75
    0.333333
    """
    temperature, softcap, vocab_size, exact = scaling
    vocab_size = unembedding.shape[0] if vocab_size is None else vocab_size
    if not temperature > 0:
        raise ValueError(
            f"token_logprob: temperature must be > 0; got {temperature}. Score greedy "
            "samples at the temperature at which you train"
        )
    if hidden.dtype != unembedding.dtype:
        raise ValueError(
            f"token_logprob: hidden is {hidden.dtype} and unembedding "
            f"{unembedding.dtype}; cast one of them, so that every platform computes "
            "the same product"
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"token_logprob: softcap must be > 0 or None; got {softcap}")
    temperature = float(temperature)
    if not 0 < vocab_size <= unembedding.shape[0]:
        raise ValueError(
            f"token_logprob: vocab_size must lie in 1..{unembedding.shape[0]}, the "
            f"rows of unembedding; got {vocab_size}"
        )
    if exact is not None and vocab_size != unembedding.shape[0]:
        raise ValueError(
            "token_logprob: exact logits have a column for each row of unembedding, "
            f"{unembedding.shape[0]}; got a vocab_size of {vocab_size}"
        )
    implementation = choose(
        "token_logprob",
        implementation,
        hidden.dtype,
        kernels={
            "pallas_tpu": None,
            "pallas_gpu": _unsupported_on_gpu(hidden.shape[-1]),
        },
        interpret=interpret,
    )
    mask = jnp.ones(targets.shape, jnp.bool_) if mask is None else mask
    by_row, static = ByRow(targets, mask, kept), (vocab_size, temperature, softcap)
    if implementation == "reference" and exact is None:
        return _reference(hidden, unembedding, by_row, *static)
    split = _split(unembedding.shape, targets.shape, rules)
    columns = unembedding.shape[0]
    if split is not None:
        mesh = jax.sharding.get_abstract_mesh()
        columns //= math.prod(mesh.shape[axis] for axis in split.vocab)
    plan = _Plan(split, columns, static, implementation, interpret, exact)
    return TokenLogprob(*_fused(plan, hidden, unembedding, by_row))


def _unsupported_on_gpu(width: int) -> str | None:
    """Says why "pallas_gpu" cannot compute a call, or None."""
    if width % 64:
        return f"a width that is a multiple of 64 is needed; got {width}"
    return None


def _reference(
    hidden: Array,
    unembedding: Array,
    by_row: ByRow,
    vocab_size: int,
    temperature: float,
    softcap: float | None,
) -> TokenLogprob:
    targets, mask, kept = by_row
    # Mask before the product: 0 x NaN in the backward pass would be NaN.
    hidden = jnp.where(mask[..., None], hidden, 0)
    logits = jnp.einsum(
        "btd,vd->btv", hidden, unembedding, preferred_element_type=jnp.float32
    )
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    exists = jnp.arange(unembedding.shape[0]) < vocab_size
    logits = jnp.where(exists, logits, MASKED)
    found = from_logits(logits, targets, temperature, kept)
    return TokenLogprob(*(jnp.where(mask, value, 0.0) for value in found))


class _Plan(NamedTuple):
    """The static part of one call.

    Attributes:
        split: mesh axes that split batch and vocabulary; None on one device.
        columns: rows of the weight on a device.
        scaling: number of real columns, temperature and softcap.
        implementation: that computes it.
        interpret: whether a Pallas kernel is interpreted.
        exact: as in `Scaling`.
    """

    split: TableSplit | None
    columns: int
    scaling: tuple[int, float, float | None]
    implementation: Implementation
    interpret: bool
    exact: ExactLogits | None

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the vocabulary."""
        return () if self.split is None else self.split.vocab

    def bound(self) -> tuple[Callable, Callable]:
        """The forward and the backward pass of the implementation."""
        if self.implementation == "pallas_tpu":
            # Half a second that only programs for TPUs need.
            from jaxrl_post.kernels.token_logprob import pallas_tpu

            module: Any = pallas_tpu
            layout: Any = pallas_tpu.Layout(
                *self.scaling, self.axes, interpret=self.interpret
            )
        elif self.implementation == "pallas_gpu":
            from jaxrl_post.kernels.token_logprob import pallas_gpu

            module = pallas_gpu
            layout = pallas_gpu.Layout(
                *self.scaling, self.axes, interpret=self.interpret
            )
        else:
            module, layout = xla, self._layout()
        forward = functools.partial(module.forward, layout=layout)
        if self.exact is not None:
            # The kernels' backward passes leave its logits unread.
            forward = functools.partial(xla.forward, layout=self._layout())
        return forward, functools.partial(module.backward, layout=layout)

    def _layout(self) -> xla.Layout:
        """The layout of "xla", which computes exact values for all implementations."""
        tile = tile_rows(self.columns)
        if self.exact is not None:
            tile = max(1, tile // self.exact.tile) * self.exact.tile
        return xla.Layout(tile, *self.scaling, self.axes, self.exact)


def _split(
    weight_shape: tuple[int, ...], batch_shape: tuple[int, ...], rules: Rules
) -> TableSplit | None:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    spec = partition_spec(
        batch_shape, ("batch", "length"), mesh, rules, name="token_logprob batch"
    )
    batch = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
    return TableSplit.of(weight_shape, batch, mesh, rules)


def tile_rows(columns: int) -> int:
    """Rows of a tile of logits with `columns` columns on a device.

    >>> tile_rows(32064), tile_rows(256)
    (520, 1024)
    """
    return max(8, min(TILE_BYTES // (4 * columns), 1024) // 8 * 8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(
    plan: _Plan,
    hidden: Array,
    weight: Array,
    by_row: ByRow,
) -> tuple[Array, Array, Array]:
    return _fused_forward(plan, hidden, weight, by_row)[0]


def _fused_forward(
    plan: _Plan, hidden: Array, weight: Array, by_row: ByRow
) -> tuple[tuple[Array, Array, Array], Any]:
    forward, _ = plan.bound()

    def local(hidden: Array, weight: Array, by_row: ByRow) -> Any:
        shape = hidden.shape[:-1]
        flat = hidden.reshape(-1, hidden.shape[-1])
        logprob, entropy, residuals = forward(flat, weight, _flat(by_row))
        found = logprob, residuals._replace(entropy=entropy, logits=None)
        return jax.tree.map(lambda a: a.reshape(shape), found), residuals.logits

    if plan.split is not None:
        rows = P(plan.split.batch)
        local = on_parts(
            local,
            in_specs=(rows, plan.split.rows, rows),
            out_specs=(rows, P(plan.split.batch, plan.split.vocab)),
        )
    (logprob, residuals), logits = local(hidden, weight, by_row)
    found = logprob, residuals.entropy, residuals.normalizer
    return found, (logits, hidden, weight, by_row, residuals)


def _flat(by_row: Any) -> Any:
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), by_row)


def _fused_backward(
    plan: _Plan, saved: Any, cotangents: tuple[Array, Array, Array]
) -> Any:
    _, backward = plan.bound()

    def local(
        logits: Array | None,
        hidden: Array,
        weight: Array,
        by_row: ByRow,
        residuals: Residuals,
        cotangents: tuple[Array, Array, Array],
    ) -> tuple[Array, Array]:
        shape = hidden.shape
        d_hidden, d_weight = backward(
            hidden.reshape(-1, shape[-1]),
            weight,
            _flat(by_row),
            _flat(residuals)._replace(logits=logits),
            _flat(cotangents),
        )
        if plan.axes:
            d_hidden = jax.lax.psum(d_hidden, plan.axes)
        if plan.split is not None:
            d_weight = plan.split.total(d_weight)
        d_hidden = d_hidden.reshape(shape).astype(hidden.dtype)
        return d_hidden, d_weight.astype(weight.dtype)

    if plan.split is not None:
        rows = P(plan.split.batch)
        of_logits = P(plan.split.batch, plan.split.vocab)
        local = on_parts(
            local,
            in_specs=(of_logits, rows, plan.split.rows, rows, rows, rows),
            out_specs=(rows, plan.split.gradient),
        )
    logits, hidden, weight, by_row, residuals = saved
    gradients = local(logits, hidden, weight, by_row, residuals, cotangents)
    return *gradients, None


_fused.defvjp(_fused_forward, _fused_backward)
