"""Reads and writes the weights of a model directory as an Orbax checkpoint.

The directory has a folder `params` next to config.json and the tokenizer. This folder
is an Orbax checkpoint: a flat dictionary from parameter paths, such as
"layers.0.attention.query", to arrays in our layout. Any program with Orbax can read it.
We read it with TensorStore, on which Orbax is built, region by region like safetensors:
the host holds little more than the loaded parameters, and a missing or truncated file
raises an error. As in safetensors, the values have no checksum.
"""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.layout import Index, Weight
from jaxrl_post.pretrained.name_map import paths
from jaxrl_post.pretrained.tensor_files import STORED_DTYPES, Tensor
from jaxrl_post.types import Array, PyTree

__all__ = [
    "CHUNK_BYTES",
    "is_orbax_directory",
    "open_arrays",
    "own_weights",
    "write_arrays",
]

PARAMS = "params"

# Orbax writes this file last; all other files are found from it.
MANIFEST = "manifest.ocdbt"

# Bytes of an array per chunk. A chunk is compressed and read as a whole, so chunks are
# small: reading a shard then reads few bytes too many.
CHUNK_BYTES = 1 << 22

# Bytes of recently read chunks to keep, because neighbouring shards share chunks.
CACHE_BYTES = 1 << 26

# The names of dtypes in safetensors by NumPy's names.
DTYPES = {**STORED_DTYPES, "float64": "F64"}


def write_arrays(
    directory: Path | None,
    values: Mapping[str, Array],
    max_file_bytes: int,
    path: str | os.PathLike[str],
) -> None:
    """Writes parameters as the Orbax folder of a model directory.

    The host holds a copy of the parameters (none if they are on CPU devices already)
    and the arrays being compressed: one gigabyte or the largest array.

    Args:
        directory: the model directory; None in a process that does not write.
        values: the parameters by path.
        max_file_bytes: size at which a new file is started, >= CHUNK_BYTES; a file may
            exceed it by one chunk.
        path: of the model, for messages.

    Raises:
        CheckpointError: a dtype cannot be stored, the disk is full, or JAX runs with
            several processes.
        ValueError: `max_file_bytes` is too small.
    """
    if max_file_bytes < CHUNK_BYTES:
        raise ValueError(
            f"max_file_bytes: must be at least {CHUNK_BYTES}, the size of a chunk; got "
            f"{max_file_bytes}"
        )
    if jax.process_count() > 1:
        # Orbax would wait for the other processes, and refuses arrays of a single one.
        raise CheckpointError(
            f"{path}: Orbax cannot save from one of {jax.process_count()} processes; "
            f'save with weights_format="huggingface", and then: '
            f"python -m launch.convert --format orbax"
        )
    assert directory is not None, "there is one process"
    for name, value in values.items():
        if value.dtype.name not in STORED_DTYPES:
            raise CheckpointError(
                f"params: {name} must have one of the dtypes "
                f"{', '.join(STORED_DTYPES)}; got {value.dtype}"
            )
    try:
        _write(directory / PARAMS, values, max_file_bytes)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: the parameters could not be written: {_first_line(error)}; "
            f"nothing was left behind, so free space and save again"
        ) from error


def is_orbax_directory(directory: Path) -> bool:
    """Whether the weights of a model directory are Orbax arrays.

    Raises:
        CheckpointError: the directory has weights in both formats.
    """
    if not (directory / PARAMS).is_dir():
        return False
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if others:
        raise CheckpointError(
            f"{directory}: has weights twice, in {PARAMS}/ and in {others[0]}; move "
            f"those that are not meant out of the directory"
        )
    return True


def own_weights(specs: PyTree) -> dict[str, Weight]:
    """Returns weights for tensors that have our parameters' names and layouts.

    Args:
        specs: tree of ParamSpecs.

    >>> from jaxrl_post.models.spec import ParamSpec
    >>> spec = ParamSpec((8, 4), ("embed", "ffn"))
    >>> own_weights({"layers": [{"up": spec}]})["layers.*.up"]
    Weight(name='layers.*.up', layout='embed ffn', ...)
    """
    # A language model's checkpoint has it; a value model made from it leaves it unread.
    weights = {"unembedding": Weight("unembedding", "vocab embed")}
    for path, spec in paths(specs).items():
        pattern = re.sub(r"^layers\.\d+\.", "layers.*.", path)
        weights[pattern] = Weight(pattern, " ".join(spec.axes))
    return weights


def open_arrays(directory: Path) -> dict[str, Tensor]:
    """Opens the arrays of a model directory; values are read on `fetch`.

    Args:
        directory: a directory for which `is_orbax_directory` is true.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or no Orbax checkpoint.
    """
    # Imported here because most programs read safetensors only.
    import tensorstore

    folder = directory.absolute() / PARAMS
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}; this is no folder of Orbax's, or not all of "
            f"it; copy it again, or use: python -m launch.convert --format orbax"
        )
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    files = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    tensors = {}
    try:
        store = tensorstore.KvStore.open(files, context=context).result()
        keys = (key.decode() for key in store.list().result())
        names = [key.removesuffix("/.zarray") for key in keys if _is_header(key)]
        opening = {
            name: tensorstore.open(
                {
                    "driver": "zarr",
                    "kvstore": {**files, "path": f"{name}/"},
                    # A missing chunk must raise, not read as zeros.
                    "fill_missing_data_reads": False,
                    # The files do not change, so cached chunks stay valid.
                    "recheck_cached_data": False,
                },
                open=True,
                read=True,
                context=context,
            )
            for name in names
        }
        for name, future in opening.items():
            array = future.result()
            dtype = array.dtype.name
            fetch = functools.partial(_region, folder, name, array)
            tensors[name] = Tensor(folder, array.shape, DTYPES.get(dtype, dtype), fetch)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: cannot be read: {_first_line(error)}; it is incomplete or "
            f"damaged; copy or convert it again"
        ) from error
    return tensors


def _write(folder: Path, values: Mapping[str, Array], max_file_bytes: int) -> None:
    import orbax.checkpoint as ocp

    # The limit must exceed the largest array, or Orbax could never write this array.
    largest = max(value.nbytes for value in values.values())
    handler = ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=1 + largest // 10**9, use_ocdbt=True, use_zarr3=False
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            folder,
            args=ocp.args.PyTreeSave(
                item=dict(values),
                save_args={
                    name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in values
                },
                ocdbt_target_data_file_size=max_file_bytes,
            ),
        )


def _is_header(key: str) -> bool:
    return key.endswith("/.zarray")


def _region(folder: Path, name: str, array: Any, region: Index) -> np.ndarray:
    try:
        return array[region].read().result()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: array {name} cannot be read: {_first_line(error)}; the folder "
            f"is incomplete or damaged; copy or convert it again"
        ) from error


def _first_line(error: Exception) -> str:
    # TensorStore appends [tensorstore_spec='...'], about 1,000 characters of JSON.
    return re.split(r" \[\w+='|\n", str(error), maxsplit=1)[0]
