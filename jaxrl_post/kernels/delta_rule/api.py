"""Sharding of the gated delta rule, and its recurrence for one token."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.delta_rule import chunks
from jaxrl_post.kernels.delta_rule.plan import DeltaPlan
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes
from jaxrl_post.types import Array, Float

__all__ = ["DeltaInputs", "delta_continued", "delta_rule", "delta_step"]


class DeltaInputs(NamedTuple):
    """The changes that tokens make to a head's state, S, and what they ask of it.

        S <- e^decay S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

    Attributes:
        query: q, of any scale.
        key: k, of length 1 or less.
        value: v; heads is a multiple of key_heads, and each key head serves as many
            neighbouring heads.
        decay: float32, at most 0, in nats.
        beta: in [0, 1], the part of v that replaces what the state has for k.
    """

    query: Float[Array, "batch length key_heads key_dim"]
    key: Float[Array, "batch length key_heads key_dim"]
    value: Float[Array, "batch length heads value_dim"]
    decay: Float[Array, "batch length heads"]
    beta: Float[Array, "batch length heads"]

    def by_head(self) -> tuple[Array, Array, Array, Array, Array]:
        """The same, with queries and keys of every head."""
        times = self.value.shape[2] // self.key.shape[2]
        query, key = (jnp.repeat(each, times, axis=2) for each in self[:2])
        return query, key, *self[2:]


def delta_rule(
    inputs: DeltaInputs, plan: DeltaPlan, rules: Rules = DEFAULT_RULES
) -> Float[Array, "batch length heads value_dim"]:
    """Returns o of packed trees that begin without a state; differentiable.

    Sums are float32 in full precision, in chunks (`chunks`). A row that needs more
    states than its plan has slots gets NaN.

    Args:
        inputs: any float dtype.
        plan: of `plan_trees`.
        rules: how rows and heads are split over the mesh of `jax.set_mesh`.

    Returns:
        float32; 0 for padding.

    References:
        Yang et al., Gated Delta Networks, arXiv:2412.06464.

    >>> from jaxrl_post.kernels.delta_rule.plan import plan_trees
    >>> plan = plan_trees(jnp.array([[-1, 0]]), jnp.array([[2, 2]]))
    >>> one = jnp.ones((1, 2, 1, 1))
    >>> forgets_half = jnp.full((1, 2, 1), -0.6931472)
    >>> inputs = DeltaInputs(one, one, one, forgets_half, jnp.full((1, 2, 1), 0.5))
    >>> [round(x, 4) for x in delta_rule(inputs, plan).reshape(-1).tolist()]
    [0.5, 0.625]
    """

    def local(inputs: DeltaInputs, plan: DeltaPlan) -> Array:
        return chunks.chunked(inputs.by_head(), plan)

    specs = functools.partial(_specs, inputs, rules)
    call = _on_parts(local, (specs(inputs), specs(plan)), specs(inputs).value)
    return call(inputs, plan)


def delta_continued(
    inputs: DeltaInputs,
    plan: DeltaPlan,
    state: Float[Array, "batch heads key_dim value_dim"],
    rules: Rules = DEFAULT_RULES,
) -> tuple[
    Float[Array, "batch length heads value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
]:
    """Returns o of rows that continue sequences, and the states after them.

    Args:
        inputs: any float dtype.
        plan: of `plan_rows`.
        state: float32, S of each row before its first token.
        rules: as for `delta_rule`.
    """

    def local(inputs: DeltaInputs, plan: DeltaPlan, state: Array) -> Any:
        return chunks.continued(inputs.by_head(), plan, state)

    specs = functools.partial(_specs, inputs, rules)
    of_state = P(*specs(inputs).decay[::2])
    outs = specs(inputs).value, of_state
    call = _on_parts(local, (specs(inputs), specs(plan), of_state), outs)
    return call(inputs, plan, state)


def delta_step(
    inputs: DeltaInputs, state: Float[Array, "batch heads key_dim value_dim"]
) -> tuple[
    Float[Array, "batch 1 heads value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
]:
    """Returns o of one token of each row, and the states after it.

    S^T k and S^T q are read from the state before the token in one product.

    Args:
        inputs: of length 1; a row with decay 0 and beta 0 keeps its state.
        state: float32.
    """
    query, key, value, decay, beta = (
        each[:, 0].astype(jnp.float32) for each in inputs.by_head()
    )
    both = jnp.stack([key, query], axis=-1)
    found = jnp.einsum("bhkv,bhkn->bhnv", state, both, precision="highest")
    kept = jnp.exp(decay)
    found = kept[..., None, None] * found
    written = beta[..., None] * (value - found[:, :, 0])
    overlap = jnp.sum(key * query, axis=-1, keepdims=True)
    out = found[:, :, 1] + overlap * written
    after = kept[..., None, None] * state + key[..., None] * written[..., None, :]
    return out[:, None], after


def _specs(inputs: DeltaInputs, rules: Rules, tree: Any) -> Any:
    """PartitionSpecs: rows over the batch's axes; of inputs, heads over theirs."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, _, heads = inputs.decay.shape
    batch = dividing_axes("batch", rows, mesh, rules) or None
    # Key heads and their heads lie on one device.
    split = dividing_axes("heads", inputs.key.shape[2], mesh, rules) or None
    assert split is None or heads % inputs.key.shape[2] == 0
    if isinstance(tree, DeltaInputs):
        return jax.tree.map(lambda _: P(batch, None, split), tree)
    return jax.tree.map(lambda _: P(batch), tree)


def _on_parts(function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(function, in_specs=ins, out_specs=outs, check_vma=False)
