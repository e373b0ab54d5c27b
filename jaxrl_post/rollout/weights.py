"""Hands the trainer's parameters to the sampler, without a copy if possible."""

from collections.abc import Iterable

import jax
from jax.sharding import NamedSharding

from jaxrl_post.sampler.engine import Engine
from jaxrl_post.sampler.requests import Completion, Request, SampleId
from jaxrl_post.types import Array, PyTree

__all__ = ["Published", "buffer_pointers", "publish"]


class Published:
    """The engine bound to one version of the parameters; implements `Sampler`.

    Valid until the next optimizer step, to which the trainer's arrays are donated.

    Args:
        engine: the engine, which holds no parameters of its own.
        params: the parameters of this version.
        version: recorded with every sampled token.
        bytes_moved: bytes that publishing moved, over all devices.
    """

    def __init__(
        self, engine: Engine, params: PyTree, version: int, bytes_moved: int
    ) -> None:
        self.engine, self.params = engine, params
        self.version, self.bytes_moved = version, bytes_moved

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return self.engine.busy

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self.engine.submit(request)

    def dispatch(self) -> None:
        """Starts decoding a burst with the bound parameters."""
        self.engine.dispatch(self.params, version=self.version)

    def collect(self) -> list[Completion]:
        """Waits for the burst; returns finished completions."""
        return self.engine.collect()

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        return self.engine.cancel(samples)


def publish(
    engine: Engine, params: PyTree, version: int, shardings: PyTree | None = None
) -> Published:
    """Binds the trainer's parameters to the engine.

    With the trainer's shardings, the engine uses the same arrays and nothing moves.
    Arrays with other `shardings` are resharded one after the other.

    Args:
        engine: the engine to bind.
        params: the trainer's arrays.
        version: number of optimizer steps taken.
        shardings: tree of the sampler's shardings; None for the trainer's shardings.
    """
    if shardings is None:
        return Published(engine, params, version, 0)
    moved = 0

    def place(leaf: Array, sharding: NamedSharding) -> Array:
        nonlocal moved
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        placed = jax.device_put(leaf, sharding)
        moved += sum(shard.data.nbytes for shard in placed.addressable_shards)
        return placed

    return Published(engine, jax.tree.map(place, params, shardings), version, moved)


def buffer_pointers(tree: PyTree) -> list[tuple[int, int]]:
    """(device id, address) of every local shard; equal addresses mean no copy."""
    return [
        (shard.device.id, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]
