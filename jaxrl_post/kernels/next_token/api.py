"""Validation and sharding of the next token."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.dispatch import Implementation, choose, platform
from jaxrl_post.kernels.next_token import reference, xla
from jaxrl_post.kernels.next_token.parts import Layout
from jaxrl_post.kernels.next_token.parts import draw as draw_by_parts
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    Rules,
    TableSplit,
    dividing_axes,
    on_parts,
)
from jaxrl_post.types import Array, Float, Int

__all__ = ["NextToken", "next_token"]

# A device's float32 logits up to which "xla" holds them. On two CPU cores tiles took a
# third longer at 1 MiB, as long at 8, and a fifth to a half of the time at 31 and 37.
LOGIT_BYTES = 8 * 2**20


class NextToken(NamedTuple):
    """Drawn tokens, int32, and their log-probs, float32, in nats."""

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]


def next_token(
    hidden: Float[Array, "rows hidden"],
    unembedding: Float[Array, "vocab hidden"],
    uniforms: Float[Array, " rows"],
    temperature: Float[Array, " rows"],
    *,
    divisor: float = 1.0,
    softcap: float | None = None,
    rules: Rules = DEFAULT_RULES,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> NextToken:
    """Draws from softmax(hidden unembedding^T / temperature), with the log-prob.

    The token is the first whose cumulative probability exceeds the row's uniform
    number; at temperature 0 it is the first of the likeliest, with its log-prob at
    temperature 1. A row with a logit of NaN has a log-prob of NaN.

    Args:
        hidden: final hidden states, any float dtype.
        unembedding: the same dtype.
        uniforms: float32 in [0, 1), the only source of randomness.
        temperature: float32, >= 0.
        divisor: > 0, of the logits, before the softcap.
        softcap: > 0, c in c tanh(logits / c), before the temperature; None for no cap.
        rules: how rows and vocabulary are split over the mesh of `jax.set_mesh`.
        implementation: "auto" takes "pallas_tpu" on TPUs and "pallas_gpu" on Hopper
            GPUs in bfloat16, which hold no logits in memory but a sum for every 16 of
            them, and "xla" elsewhere, which holds them, or on a CPU a tile of them if
            they would take more than 8 MiB; "reference" holds them all. "pallas_gpu"
            takes widths that 64 divides, and at least 256 vocabulary entries a device,
            a multiple of 8.
        interpret: whether a Pallas kernel is interpreted, to debug it on any platform.

    Raises:
        ValueError: the implementation is unknown, does not run here, or cannot compute
            this call.

    >>> import jax.numpy as jnp
    >>> h, w = jnp.zeros((1, 3)), jnp.ones((4, 3))  # four tokens, a quarter each
    >>> found = next_token(h, w, jnp.array([0.6]), jnp.ones(1))
    >>> found.tokens.item(), round(found.logprobs.item(), 4)  # -ln 4
    (2, -1.3863)
    """
    mesh = jax.sharding.get_abstract_mesh()
    batch: tuple[str, ...] = ()
    split = TableSplit()
    several = not (mesh.empty or mesh.size == 1)
    if several:
        batch = dividing_axes("batch", hidden.shape[0], mesh, rules)
        split = TableSplit.of(unembedding.shape, batch, mesh, rules)
    vocab = unembedding.shape[0] // math.prod(mesh.shape[axis] for axis in split.vocab)
    problem = _unsupported_on_gpu(hidden.shape[1], vocab)
    implementation = choose(
        "next_token",
        implementation,
        hidden.dtype,
        kernels={"pallas_tpu": None, "pallas_gpu": problem},
        interpret=interpret,
    )
    if implementation == "xla":
        devices = math.prod(mesh.shape[axis] for axis in (*batch, *split.vocab))
        logit_bytes = 4 * hidden.shape[0] * unembedding.shape[0] // devices
        # Tiles have been measured on CPUs alone.
        if platform() != "cpu" or logit_bytes <= LOGIT_BYTES:
            implementation = "reference"
    if implementation == "reference":
        logits = jnp.einsum(
            "td,vd->tv", hidden, unembedding, preferred_element_type=jnp.float32
        )
        if divisor != 1.0:
            logits = logits / divisor
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        return NextToken(*reference.draw(logits, uniforms, temperature, rules))
    passes: Any = xla
    if implementation == "pallas_tpu":
        # Half a second that only programs for TPUs need, or for GPUs.
        from jaxrl_post.kernels.next_token import pallas_tpu as passes
    if implementation == "pallas_gpu":
        from jaxrl_post.kernels.next_token import pallas_gpu as passes
    local = functools.partial(
        draw_by_parts,
        passes=passes,
        layout=Layout(divisor, softcap, split.vocab, interpret=interpret),
    )
    if several:
        by_row = P(batch)
        local = on_parts(
            local, in_specs=(by_row, split.rows, by_row, by_row), out_specs=by_row
        )
    return NextToken(*local(hidden, unembedding, uniforms, temperature))


def _unsupported_on_gpu(width: int, vocab: int) -> str | None:
    """Says why "pallas_gpu" cannot compute a call, or None."""
    if width % 64:
        return f"a width that is a multiple of 64 is needed; got {width}"
    if vocab < 256 or vocab % 8:
        return (
            "at least 256 vocabulary entries a device, a multiple of 8, are needed; "
            f"got {vocab}"
        )
    return None
