"""Gated delta nets (Yang et al., arXiv:2412.06464)."""

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.linear_attention import LinearInputs
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layers import project
from jaxrl_post.models.recurrent.linear import Linear, Seen, convolved
from jaxrl_post.models.recurrent_params import GatedDeltaParams
from jaxrl_post.types import Array

__all__ = ["DELTA"]

# Added to the squared lengths of queries and keys, as in all releases.
LENGTH_EPSILON = 1e-6


def _tokens(
    params: GatedDeltaParams[Array], x: Array, seen: Seen
) -> tuple[LinearInputs, None]:
    """Queries and keys of length 1, queries divided by the root of their width."""
    query, key, value = (
        convolved(kernel, None, part)
        for kernel, part in zip(
            (params.query_kernel, params.key_kernel, params.value_kernel),
            seen,
            strict=True,
        )
    )
    query, key = (
        each
        * jax.lax.rsqrt(
            jnp.sum(jnp.square(each), axis=-1, keepdims=True) + LENGTH_EPSILON
        )
        for each in (query, key)
    )
    rate, bias = (each.astype(jnp.float32) for each in (params.rate, params.step_bias))
    step = project(x, params.decay).astype(jnp.float32) + bias
    decay = -jnp.exp(rate) * jax.nn.softplus(step)
    beta = jax.nn.sigmoid(project(x, params.beta))
    return LinearInputs(query * query.shape[-1] ** -0.5, key, value, decay, beta), None


def _output(
    config: ModelConfig,
    params: GatedDeltaParams[Array],
    x: Array,
    out: Array,
    _: Array | None,
) -> Array:
    """Norms each head, gates it, and projects it to the residual stream."""
    variance = jnp.mean(jnp.square(out), axis=-1, keepdims=True)
    normed = out * jax.lax.rsqrt(variance + config.rms_norm_eps)
    gate = project(x, params.output_gate).reshape(out.shape)
    gated = params.norm.astype(jnp.float32) * normed
    gated = gated * jax.nn.silu(gate.astype(jnp.float32))
    flat = gated.astype(x.dtype).reshape(x.shape[0], -1)
    return project(flat, params.output, inputs=2)


DELTA = Linear(_tokens, _output)
