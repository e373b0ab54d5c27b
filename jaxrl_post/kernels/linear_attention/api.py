"""Sharding of linear attention, and its recurrence for one token."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.linear_attention import chunks
from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.kernels.linear_attention.plan import StatePlan
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes
from jaxrl_post.types import Array, Float

__all__ = ["linear_attention", "linear_continued", "linear_step"]


def linear_attention(
    inputs: LinearInputs, plan: StatePlan, rules: Rules = DEFAULT_RULES
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
        Yang et al., Gated Delta Networks, arXiv:2412.06464; Dao and Gu, Transformers
        are SSMs, arXiv:2405.21060 (values that are added).

    >>> from jaxrl_post.kernels.linear_attention.plan import plan_trees
    >>> plan = plan_trees(jnp.array([[-1, 0]]), jnp.array([[2, 2]]))
    >>> one = jnp.ones((1, 2, 1, 1))
    >>> forgets_half = jnp.full((1, 2, 1), -0.6931472)
    >>> inputs = LinearInputs(one, one, one, forgets_half, jnp.full((1, 2, 1), 0.5))
    >>> [round(x, 4) for x in linear_attention(inputs, plan).reshape(-1).tolist()]
    [0.5, 0.625]
    """

    def local(inputs: LinearInputs, plan: StatePlan) -> Array:
        return chunks.chunked(inputs.by_head(), plan)

    specs = functools.partial(_specs, inputs, rules)
    call = _on_parts(local, (specs(inputs), specs(plan)), specs(inputs).value)
    return call(inputs, plan)


def linear_continued(
    inputs: LinearInputs,
    plan: StatePlan,
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
        rules: as for `linear_attention`.
    """

    def local(inputs: LinearInputs, plan: StatePlan, state: Array) -> Any:
        return chunks.continued(inputs.by_head(), plan, state)

    specs = functools.partial(_specs, inputs, rules)
    of_state = P(*specs(inputs).decay[::2])
    outs = specs(inputs).value, of_state
    call = _on_parts(local, (specs(inputs), specs(plan), of_state), outs)
    return call(inputs, plan, state)


def linear_step(
    inputs: LinearInputs, state: Float[Array, "batch heads key_dim value_dim"]
) -> tuple[
    Float[Array, "batch 1 heads value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
]:
    """Returns o of one token of each row, and the states after it.

    S^T k and S^T q are read from the state before the token in one product.

    Args:
        inputs: of length 1; a row with decay 0, and beta or else the value 0, keeps its
            state.
        state: float32.
    """
    query, key, value, decay, beta = jax.tree.map(
        lambda each: each[:, 0].astype(jnp.float32), inputs.by_head()
    )
    asked = [query] if beta is None else [query, key]
    found = jnp.einsum(
        "bhkv,bhkn->bhnv", state, jnp.stack(asked, axis=-1), precision="highest"
    )
    kept = jnp.exp(decay)
    found, written = kept[..., None, None] * found, value
    if beta is not None:
        written = beta[..., None] * (value - found[:, :, 1])
    overlap = jnp.sum(key * query, axis=-1, keepdims=True)
    out = found[:, :, 0] + overlap * written
    after = kept[..., None, None] * state + key[..., None] * written[..., None, :]
    return out[:, None], after


def _specs(inputs: LinearInputs, rules: Rules, tree: Any) -> Any:
    """PartitionSpecs: rows over the batch's axes; of inputs, heads over theirs."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, _, heads = inputs.decay.shape
    batch = dividing_axes("batch", rows, mesh, rules) or None
    # Key heads and their heads lie on one device.
    split = dividing_axes("heads", inputs.key.shape[2], mesh, rules) or None
    assert split is None or heads % inputs.key.shape[2] == 0
    if isinstance(tree, LinearInputs):
        return jax.tree.map(lambda _: P(batch, None, split), tree)
    return jax.tree.map(lambda _: P(batch), tree)


def _on_parts(function: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(function, in_specs=ins, out_specs=outs, check_vma=False)
