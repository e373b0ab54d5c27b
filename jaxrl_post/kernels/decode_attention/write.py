"""Stores the keys and values of new tokens in the cached arrays."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.decode_attention.quantized import Entries
from jaxrl_post.kernels.dispatch import Implementation, choose, without_gpu_kernel
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, on_parts
from jaxrl_post.types import Array, Int

__all__ = ["write_entries"]


def write_entries(
    entries: tuple[Entries, ...],
    new: tuple[Entries, ...],
    places: Int[Array, "batch new"],
    *,
    rules: Rules = DEFAULT_RULES,
    implementation: Implementation = "auto",
    interpret: bool = False,
) -> tuple[Entries, ...]:
    """Returns the entries with the new tokens' entries stored in their places.

    A jitted caller that donates the entries, or carries them through a loop, gets them
    changed in place. The kernel keeps the layout that decode attention reads: XLA's
    scatter has another one on a TPU, and all entries would be copied between the two.

    Args:
        entries: [batch, kv_heads, keys, any width] each, such as keys and values.
        new: of the same tree, [batch, kv_heads, new, width].
        places: int32, of consecutive tokens in a row; a place of `keys` or more drops
            its token.
        rules: how a mesh of `jax.set_mesh`, if any, splits batch and heads.
        implementation: as in `decode_attention`; on GPUs XLA's scatter keeps the
            layout, and "pallas_gpu" takes it on a Hopper GPU. "pallas_tpu" leaves to
            XLA what its kernel does badly: more than 16 new tokens of a sequence, and
            keys that are no whole number of its blocks.
        interpret: as in `decode_attention`.

    Raises:
        ValueError: the implementation is unknown or does not run here.

    >>> import jax.numpy as jnp
    >>> old, fresh = jnp.zeros((1, 1, 3, 1)), jnp.ones((1, 1, 1, 1))
    >>> (made,) = write_entries((old,), (fresh,), jnp.array([[1]]))
    >>> made.ravel().tolist()
    [0.0, 1.0, 0.0]
    """
    leaf = jax.tree.leaves(new)[-1]
    # The last leaf of codes holds their scales.
    implementation = without_gpu_kernel(
        "write_entries", implementation, leaf.dtype, interpret=interpret
    )
    wanted = choose("write_entries", implementation, leaf.dtype, interpret=interpret)
    if wanted != "pallas_tpu":
        return jax.tree.map(lambda old, new: _scattered(old, new, places), entries, new)
    # Half a second that only TPUs need.
    from jaxrl_post.kernels.decode_attention import pallas_tpu_write

    if not pallas_tpu_write.fits(entries, places.shape[1]):
        return jax.tree.map(lambda old, new: _scattered(old, new, places), entries, new)
    write = functools.partial(pallas_tpu_write.write, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return write(entries, new, places)
    batch = dividing_axes("batch", leaf.shape[0], mesh, rules) or None
    heads = dividing_axes("kv_heads", leaf.shape[1], mesh, rules) or None
    return on_parts(
        write,
        in_specs=(P(batch, heads), P(batch, heads), P(batch)),
        out_specs=P(batch, heads),
    )(entries, new, places)


def _scattered(old: Array, new: Array, places: Array) -> Array:
    def put(old: Any, new: Any, at: Any) -> Any:
        return old.at[:, at].set(new, mode="drop", unique_indices=True)

    # vmap over sequences, so that those split over a mesh need no communication.
    return jax.vmap(put)(old, new, places)
