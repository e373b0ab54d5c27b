"""Sharding of linear attention, and its recurrence for one token."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.dispatch import Implementation, choose, without_gpu_kernel
from jaxrl_post.kernels.linear_attention import chunks, pallas_tpu
from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.kernels.linear_attention.plan import StatePlan
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, on_parts
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
    inputs: LinearInputs,
    state: Float[Array, "batch heads key_dim value_dim"],
    rules: Rules = DEFAULT_RULES,
    implementation: Implementation = "auto",
    *,
    interpret: Any = False,
) -> tuple[
    Float[Array, "batch 1 heads value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
]:
    """Returns o of one token of each row, and the states after it.

    The kernel for TPUs reads a state once and writes it once.

    Args:
        inputs: of length 1; a row with decay 0, and beta or else the value 0, keeps its
            state.
        state: float32.
        rules: as for `linear_attention`.
        implementation: see `kernels.dispatch`; there is no kernel for GPUs.
        interpret: runs a Pallas kernel on any platform, slowly.

    Raises:
        ValueError: a kernel that is asked for by name does not run here.
    """
    tokens = jax.tree.map(lambda each: each[:, 0].astype(jnp.float32), inputs.by_head())
    parts = functools.partial(_specs, inputs, rules)
    of_tokens = jax.tree.map(lambda spec: P(*spec[::2]), parts(inputs))
    local = _local_shape(state.shape, of_tokens.decay)
    wanted = without_gpu_kernel(
        "linear_step", implementation, state.dtype, interpret=interpret
    )
    problem = pallas_tpu.problem(local[0] * local[1], local[2])
    chosen = choose(
        "linear_step",
        wanted,
        state.dtype,
        kernels={"pallas_tpu": problem},
        interpret=interpret,
    )
    if chosen != "pallas_tpu":
        out, after = _step(tokens, state)
        return out[:, None], after
    run = functools.partial(pallas_tpu.step, interpret=interpret)
    ins = of_tokens, of_tokens.decay
    call = _on_parts(run, ins, (of_tokens.value, of_tokens.decay))
    out, after = call(tokens, state)
    return out[:, None], after


def _step(tokens: LinearInputs, state: Array) -> tuple[Array, Array]:
    """S^T k and S^T q are read from the state before the token, in one product."""
    query, key, value, decay, beta = tokens
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
    return out, kept[..., None, None] * state + key[..., None] * written[..., None, :]


def _local_shape(shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
    """The shape of a device's part."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return shape
    return jax.NamedSharding(mesh, spec).shard_shape(shape)


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
    return on_parts(function, in_specs=ins, out_specs=outs)
