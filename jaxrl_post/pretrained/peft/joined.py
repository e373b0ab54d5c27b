"""Converts adapters of several matrices that a checkpoint joins in one tensor."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.adapters.lora import Adapter, LoRAConfig, LoRAParams, adaptable
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.matrix import expert_dims, input_dims, target_name
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.name_map import Entry
from jaxrl_post.types import Array

__all__ = ["joined", "parted", "widened"]


def joined(
    config: ModelConfig,
    bases: Mapping[str, Entry],
    adapter: Adapter[Array],
    lora: LoRAConfig,
) -> tuple[LoRAConfig, dict[str, LoRAConfig], Adapter[Array]]:
    """Returns an equal adapter in which the parts of a joined matrix share one A.

    For n parts, A stacks their A and B is block diagonal, so the rank is n times as
    large. The other matrices get the same rank, padded with zeros, since some servers
    do not support different ranks. Only routed experts' matrices have their own rank,
    because they are the larger part of a file.

    Args:
        config: the base model's config.
        bases: the entry of every matrix that may be adapted.
        adapter: the adapter.
        lora: the adapter's config.

    Returns:
        (lora, by_target, adapter): targets in `by_target` have another rank and alpha.

    Raises:
        CheckpointError: DoRA adapts only some parts of a joined matrix.
    """
    low_rank = {p: own for p, own in adapter.items() if isinstance(own, LoRAParams)}
    modules = _modules(bases, low_rank)
    if max(map(len, modules)) == 1:
        return lora, {}, adapter
    count = max((len(g) for g in modules if not expert_dims(g[0])), default=1)
    wider, by_target, wide = widened(lora, count), {}, {}
    for group in modules:
        owns = {path: low_rank[path] for path in group if path in low_rank}
        if lora.dora and len(owns) < len(group):
            raise CheckpointError(
                f"adapter: {', '.join(group)} are one matrix in {config.model_type} "
                "checkpoints, all of which DoRA adapts; save the model that `merged` "
                "returns"
            )
        first = expert_dims(group[0])
        blocks = len(owns) if first else count
        if first and (blocks > 1 or blocks != count):
            own = widened(lora, blocks)
            by_target |= {target_name(path): own for path in group}
        wide |= _side_by_side(bases, group, owns, blocks)
    targets = {target_name(path) for path in wide}
    wider = replace(
        wider, targets=tuple(name for name in adaptable(config) if name in targets)
    )
    return wider, by_target, adapter | wide


def parted(
    bases: Mapping[str, Entry], adapter: Adapter[Array], lora: LoRAConfig
) -> tuple[LoRAConfig, Adapter[Array]]:
    """Undoes `joined`, whose B is block diagonal; any other adapter stays as it is.

    Without it, the rank would grow each time that an adapter is read, trained and
    saved.

    Args:
        bases: the entry of every matrix that may be adapted.
        adapter: an adapter as it was read.
        lora: its config.

    Returns:
        (lora, adapter), of the rank before `joined`.
    """
    low_rank = {p: own for p, own in adapter.items() if isinstance(own, LoRAParams)}
    modules = _modules(bases, low_rank)
    count = max(map(len, modules))
    size, rest = divmod(lora.rank, count)
    if count == 1 or rest:
        return lora, adapter
    used = {path: _used(path, own, size) for path, own in low_rank.items()}
    shared = [
        [block for path in g for block in used[path]] for g in modules if len(g) > 1
    ]
    # A B of zeros may be of either kind.
    if (
        any(len(blocks) > 1 for blocks in used.values())
        or any(len(set(blocks)) < len(blocks) for blocks in shared)
        or not any(shared)
    ):
        return lora, adapter
    made = dict(adapter)
    for path, own in low_rank.items():
        first = size * (used[path] or [0])[0]
        made[path] = own.replace(  # type: ignore[attr-defined]
            down=_cut(own.down, own.down.ndim - 1, first, size),
            up=_cut(own.up, expert_dims(path), first, size),
        )
    factor = count**0.5 if lora.rank_stabilized else count
    return replace(lora, rank=size, alpha=lora.alpha / factor), made


def _used(path: str, own: LoRAParams[Array], size: int) -> list[int]:
    """Returns the blocks of `size` rows of B that are not all zero."""
    other = tuple(dim for dim in range(own.up.ndim) if dim != expert_dims(path))
    rows = np.asarray(jnp.any(own.up != 0, axis=other))
    return np.flatnonzero(rows.reshape(-1, size).any(axis=1)).tolist()


def _cut(array: Array, dim: int, first: int, size: int) -> Array:
    """Returns `size` entries of a dim from `first` on, in the array's sharding."""
    found = jax.lax.slice_in_dim(array, first, first + size, axis=dim)
    return jax.device_put(found, array.sharding)


def _modules(bases: Mapping[str, Entry], adapted: Collection[str]) -> list[list[str]]:
    """Returns the matrices of each adapted module, in its order."""
    parts: dict[str, list[str]] = {}
    for path, base in sorted(bases.items(), key=lambda item: item[1].slot.start):
        parts.setdefault(base.name, []).append(path)
    return [group for group in parts.values() if any(p in adapted for p in group)]


def _side_by_side(
    bases: Mapping[str, Entry],
    group: Sequence[str],
    owns: Mapping[str, LoRAParams[Array]],
    blocks: int,
) -> dict[str, LoRAParams[Array]]:
    """Returns the changes of the parts of a joined matrix, with one A for all parts."""
    first = expert_dims(group[0])
    first_own, *others = owns.values()
    down = _padded(first_own.down, -1, 0, blocks)
    for place, own in enumerate(others, start=1):
        down += _padded(own.down, -1, place, blocks)
    rank, dtype = down.shape[-1], first_own.up.dtype
    made = {}
    for path in group:
        whole = bases[path].layout.shape
        shape = (*whole[:first], rank, *whole[first + input_dims(path) :])
        made[path] = LoRAParams(down, jnp.broadcast_to(jnp.zeros((), dtype), shape))
    for place, (path, own) in enumerate(owns.items()):
        up = _padded(own.up, first, place, blocks)
        made[path] = LoRAParams(down, up, own.magnitude)
    return made


def _padded(array: Array, dim: int, place: int, count: int) -> Array:
    """Puts an array in block `place` of `count` blocks along a dim; others are zero."""
    blocks = [jnp.zeros_like(array)] * count
    blocks[place] = array
    return jnp.concatenate(blocks, axis=dim)


def widened(lora: LoRAConfig, count: int) -> LoRAConfig:
    """Returns `lora` with `count` times the rank and the same scale.

    >>> widened(LoRAConfig(rank=4, alpha=8.0), 2).scale
    2.0
    """
    factor = count**0.5 if lora.rank_stabilized else count
    return replace(lora, rank=count * lora.rank, alpha=factor * lora.alpha)
