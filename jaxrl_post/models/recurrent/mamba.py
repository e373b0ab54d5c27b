"""Mamba-2 (Dao and Gu, arXiv:2405.21060)."""

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.linear_attention import LinearInputs
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layers import project
from jaxrl_post.models.recurrent.linear import Linear, Seen, convolved
from jaxrl_post.models.recurrent_params import Mamba2Params
from jaxrl_post.types import Array

__all__ = ["MAMBA2"]


def _tokens(
    params: Mamba2Params[Array], x: Array, seen: Seen
) -> tuple[LinearInputs, Array]:
    """Values times the step; and the values."""
    query = convolved(params.query_kernel, params.query_kernel_bias, seen.query)
    key = convolved(params.key_kernel, params.key_kernel_bias, seen.key)
    value = convolved(params.value_kernel, params.value_kernel_bias, seen.value)
    rate, bias = (each.astype(jnp.float32) for each in (params.rate, params.step_bias))
    step = jax.nn.softplus(project(x, params.step).astype(jnp.float32) + bias)
    decay = -jnp.exp(rate) * step
    return LinearInputs(query, key, step[..., None] * value, decay), value


def _output(
    config: ModelConfig,
    params: Mamba2Params[Array],
    x: Array,
    out: Array,
    value: Array | None,
) -> Array:
    """Adds the values, gates the sum, norms the heads of each key head, projects."""
    assert value is not None
    out = out + params.skip.astype(jnp.float32)[:, None] * value
    gate = project(x, params.output_gate).reshape(out.shape)
    gated = out * jax.nn.silu(gate.astype(jnp.float32))
    groups = gated.reshape(x.shape[0], params.key.shape[1], -1)
    variance = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
    normed = (groups * jax.lax.rsqrt(variance + config.rms_norm_eps)).reshape(out.shape)
    flat = (params.norm.astype(jnp.float32) * normed).astype(x.dtype)
    return project(flat.reshape(x.shape[0], -1), params.output, inputs=2)


MAMBA2 = Linear(_tokens, _output)
