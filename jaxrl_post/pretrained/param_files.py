"""Loads parameters from tensor files shard by shard; saves them tensor by tensor.

In addition to the parameters, the host holds about one shard and its region of the
tensor at a time while loading, and one tensor and one shard while saving.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.layout import Index
from jaxrl_post.pretrained.name_map import Entry, some
from jaxrl_post.pretrained.tensor_files import (
    STORED_DTYPES,
    StoredTensor,
    Tensor,
    write_tensors,
)
from jaxrl_post.types import Array

__all__ = ["check_same", "check_tensors", "load_parameter", "write_parameters"]

READABLE_DTYPES = ("F64", "F32", "F16", "BF16")

# Bytes compared at a time if a checkpoint stores a tied matrix twice.
COMPARED_BYTES = 1 << 24


def check_tensors(
    tensors: Mapping[str, Tensor],
    entries: Iterable[Entry],
    harmless: Callable[[str], bool],
    config_file: Path,
) -> None:
    """Compares the checkpoint's tensors with the config before their data is read.

    Args:
        tensors: the checkpoint's tensors.
        entries: entries of all parameters to read.
        harmless: whether the checkpoint may have a tensor that no entry names.
        config_file: path of config.json, for messages.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape or dtype.
    """
    expected = {entry.name: entry for entry in entries}
    missing = expected.keys() - tensors.keys()
    surplus = {name for name in tensors.keys() - expected if not harmless(name)}
    if missing or surplus:
        parts = [f"missing tensors: {some(missing)}"] if missing else []
        parts += [f"unknown tensors: {some(surplus)}"] if surplus else []
        raise CheckpointError(
            f"{config_file.parent}: the weights do not belong to {config_file.name}; "
            f"{'; '.join(parts)}"
        )
    for name, entry in expected.items():
        tensor = tensors[name]
        if tensor.shape != entry.shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} has shape {tensor.shape}, but "
                f"{config_file.name} asks for {entry.shape}"
            )
        if tensor.dtype not in READABLE_DTYPES:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} has dtype {tensor.dtype}; readable are "
                f"{', '.join(READABLE_DTYPES)}"
            )


def check_same(
    tensors: Mapping[str, Tensor], used: str, tied: str, config_file: Path
) -> None:
    """Refuses a separate output matrix if the config says that embeddings are tied."""
    left, right = tensors[used], tensors[tied]
    same = left.shape == right.shape
    length, width = left.shape
    rows = max(1, COMPARED_BYTES // (8 * width))
    for start in range(0, length if same else 0, rows):
        region = (slice(start, min(start + rows, length)), slice(0, width))
        same = same and np.array_equal(left.fetch(region), right.fetch(region))
    if not same:
        raise CheckpointError(
            f"{right.file}: {tied} differs from {used}, but tie_word_embeddings is "
            f"true; set it to false in {config_file.name} to use both"
        )


def load_parameter(
    tensors: Mapping[str, Tensor],
    entries: Sequence[Entry],
    sharding: NamedSharding | None,
    dtype: jnp.dtype,
) -> Array:
    """Reads one parameter, shard by shard, and waits until it is on its devices.

    Args:
        tensors: the checkpoint's tensors.
        entries: the parameter's entry, or one entry for every expert.
        sharding: only shards of this process's devices are read, each one once; None
            puts the parameter on JAX's default device.
        dtype: dtype of the parameter.
    """
    shape = _shape(entries)
    if sharding is None:
        whole = _shard(tensors, entries, tuple(slice(0, n) for n in shape), dtype)
        return jax.device_put(whole).block_until_ready()
    holders: dict[Index, list[Any]] = {}
    indices = sharding.devices_indices_map(shape)
    for device in sorted(sharding.addressable_devices, key=lambda d: d.id):
        bounds = (s.indices(n) for s, n in zip(indices[device], shape, strict=True))
        holders.setdefault(tuple(slice(*b) for b in bounds), []).append(device)
    arrays = []
    for index, devices in holders.items():
        values = _shard(tensors, entries, index, dtype)
        copies = [jax.device_put(values, device) for device in devices]
        arrays += jax.block_until_ready(copies)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, arrays, dtype=dtype
    )


def write_parameters(
    directory: Path | None,
    entries: Sequence[Entry],
    values: Mapping[str, Array],
    max_file_bytes: int,
    others: Mapping[str, Tensor],
) -> None:
    """Writes parameters as the tensors that the entries name.

    Args:
        directory: directory to write to; see `write_tensors`. None in the processes
            that only take part in gathering what process 0 writes.
        entries: entries of all parameters, in the order of writing.
        values: the parameters by path, in any sharding.
        max_file_bytes: limit of tensor data per file, in bytes.
        others: tensors that are written as they are, in the process that writes.

    Raises:
        CheckpointError: a dtype is not supported, or one tensor would have two dtypes.
    """
    sharers: dict[str, list[Entry]] = {}
    for entry in entries:
        sharers.setdefault(entry.name, []).append(entry)
    tensors = []
    for name, parts in sharers.items():
        dtypes = {values[part.path].dtype.name for part in parts}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"params: {', '.join(part.path for part in parts)} make one tensor and "
                f"must have one dtype; got {', '.join(sorted(dtypes))}"
            )
        tensors.append(StoredTensor(name, parts[0].shape, dtypes.pop()))

    names = {stored: name for name, stored in STORED_DTYPES.items()}
    tensors += [
        StoredTensor(name, tensor.shape, names.get(tensor.dtype, tensor.dtype))
        for name, tensor in others.items()
    ]

    def source(name: str) -> np.ndarray:
        if name in others:
            return others[name].fetch(tuple(slice(0, n) for n in others[name].shape))
        parts = sharers[name]
        tensor = np.empty(parts[0].shape, values[parts[0].path].dtype)
        for part in parts:
            _fill(tensor, part, values[part.path])
        return tensor

    if directory is None:
        for tensor in tensors:
            for part in sharers[tensor.name]:
                _whole(part, values[part.path])
        return
    write_tensors(directory, tensors, source, max_file_bytes)


def _shape(entries: Sequence[Entry]) -> tuple[int, ...]:
    experts = () if entries[0].expert is None else (len(entries),)
    return (*experts, *entries[0].layout.shape)


def _shard(
    tensors: Mapping[str, Tensor],
    entries: Sequence[Entry],
    index: Index,
    dtype: jnp.dtype,
) -> np.ndarray:
    if entries[0].expert is None:
        values = entries[0].read(tensors[entries[0].name].fetch, index)
        return np.asarray(values, dtype=dtype, order="C")
    experts, *rest = index
    chosen = entries[experts]
    sizes = [s.stop - s.start for s in rest]
    shard = np.empty((len(chosen), *sizes), dtype)
    for place, entry in zip(shard, chosen, strict=True):
        place[...] = entry.read(tensors[entry.name].fetch, tuple(rest))
    return shard


def _fill(tensor: np.ndarray, entry: Entry, value: Array) -> None:
    """Copies a parameter, or one expert of it, into its tensor, shard by shard.

    Every shard is transposed on its own device: indexing the sharded array would
    all-gather all experts once for every expert.
    """
    if not value.is_fully_addressable:
        sizes = value.shape if entry.expert is None else value.shape[1:]
        everything = tuple(slice(0, size) for size in sizes)
        entry.write(tensor, np.asarray(_whole(entry, value)), everything)
        return
    order = entry.layout.order
    for shard in value.addressable_shards:
        if shard.replica_id != 0:
            continue
        # A mesh that the caller has set would have other devices than this shard.
        with jax.set_mesh(Mesh(np.array([shard.device]), ("shard",))):
            if entry.expert is None:
                own, index = _turned(order, shard.data), shard.index
            else:
                experts, *index = shard.index
                start, stop, _ = experts.indices(value.shape[0])
                if not start <= entry.expert < stop:
                    continue
                own = _expert(order, shard.data, entry.expert - start)
        entry.write(tensor, np.asarray(own), tuple(index))


def _whole(entry: Entry, value: Array) -> Array:
    """Gathers a parameter, or one expert of it, on every device of its mesh.

    For arrays that no process can read alone. All processes must call it, in the same
    order; one tensor is gathered at a time.
    """
    assert isinstance(value.sharding, NamedSharding), "a run's arrays lie on a mesh"
    replicated = NamedSharding(value.sharding.mesh, P())
    order = entry.layout.order
    if entry.expert is None:
        whole = _gathered(order, replicated)(value)
    else:
        whole = _gathered_expert(order, replicated)(value, entry.expert)
    return whole.block_until_ready()


@functools.cache
def _gathered(order: tuple[int, ...], replicated: NamedSharding) -> Callable:
    return jax.jit(lambda value: value.transpose(order), out_shardings=replicated)


@functools.cache
def _gathered_expert(order: tuple[int, ...], replicated: NamedSharding) -> Callable:
    def run(value: Array, number: Array) -> Array:
        own = jax.lax.dynamic_index_in_dim(value, number, keepdims=False)
        return own.transpose(order)

    return jax.jit(run, out_shardings=replicated)


# Under jit the result is always a new array: a `jax.Array` caches its NumPy value, so
# without the copy the whole model would stay on the host.
@functools.partial(jax.jit, static_argnums=0)
def _turned(order: tuple[int, ...], shard: Array) -> Array:
    return shard.transpose(order)


@functools.partial(jax.jit, static_argnums=0)
def _expert(order: tuple[int, ...], shard: Array, number: int | Array) -> Array:
    own = jax.lax.dynamic_index_in_dim(shard, number, keepdims=False)
    return own.transpose(order)
