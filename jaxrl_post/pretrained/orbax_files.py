"""Model directories whose parameters Orbax has written: our paths, our layouts.

Beside config.json and the tokenizer stands a folder `params`: one Orbax checkpoint, a
flat dictionary from paths of parameters, such as "layers.0.attention.query", to arrays.
Any program with Orbax reads it. We read it with TensorStore, on which Orbax is built,
the way safetensors are read: region by region, so that a process holds little beside
what it loads, and a missing or truncated file is one error. Numbers have no checksum,
as they have none in safetensors.
"""

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.params import DecoderParams
from jaxrl_post.pretrained.directory import SavesItself, new_model_directory
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
    "save_orbax",
]

PARAMS = "params"

# What Orbax makes in the end, and from which everything else there is found.
MANIFEST = "manifest.ocdbt"

# Bytes of an array that are compressed together, hence read together: a region of a
# shard's size has few bytes too many around it.
CHUNK_BYTES = 1 << 22

# Of chunks that were just read: neighbouring shards share some of them.
CACHE_BYTES = 1 << 26

# NumPy's names of dtypes, in the terms of safetensors.
DTYPES = {**STORED_DTYPES, "float64": "F64"}


def save_orbax(
    path: str | os.PathLike[str],
    config: ModelConfig,
    params: DecoderParams[Array],
    *,
    tokenizer: SavesItself | None = None,
    source: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes a model directory of Orbax's arrays, which `pretrained.load` reads.

    The directory appears complete, under its name, or not at all. The host holds the
    parameters, a second time where they are not on CPU devices already, and what is
    being compressed: a gigabyte, or the largest array.

    Args:
        path: the directory to make; what stands there is never overwritten.
        config: of the model.
        params: in any sharding that this process can read; stored in their own dtype.
        tokenizer: written beside the model.
        source: a model directory whose special-token ids and generation_config.json
            are carried over. Without it config.json names no token that ends a text.
        max_file_bytes: at which a file is closed and another begun, >= CHUNK_BYTES; a
            file has at most one chunk more.

    Raises:
        CheckpointError: `path` is taken, the parameters are not those of `config`, no
            checkpoint of the family can say what `config` says, the disk is full, or
            there are several processes.
        ValueError: `max_file_bytes` is too small.

    >>> import tempfile, jax
    >>> from jaxrl_post import pretrained
    >>> from jaxrl_post.models import initialize, param_specs
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> params = initialize(jax.random.key(0), param_specs(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_orbax(f"{folder}/tiny", config, params)
    ...     same_config, same_params = pretrained.load(f"{folder}/tiny")
    >>> config == same_config
    True
    """
    if max_file_bytes < CHUNK_BYTES:
        raise ValueError(
            f"max_file_bytes: must be at least {CHUNK_BYTES}, the size of a chunk; got "
            f"{max_file_bytes}"
        )
    if jax.process_count() > 1:
        # Orbax would wait for the others, and takes no array of one process alone.
        raise CheckpointError(
            f"{path}: Orbax cannot save from one of {jax.process_count()} processes; "
            f"use pretrained.save, and then: python -m launch.convert --format orbax"
        )
    with new_model_directory(path, config, params, tokenizer, source) as made:
        staging, values = made
        for name, value in values.items():
            if value.dtype.name not in STORED_DTYPES:
                raise CheckpointError(
                    f"params: {name} must have one of the dtypes "
                    f"{', '.join(STORED_DTYPES)}; got {value.dtype}"
                )
        try:
            _write(staging / PARAMS, values, max_file_bytes)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: the parameters could not be written: {_first_line(error)}; "
                f"nothing was left behind, so free space and save again"
            ) from error


def is_orbax_directory(directory: Path) -> bool:
    """Whether the weights of a model directory are Orbax's arrays.

    Raises:
        CheckpointError: it has weights of both kinds.
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
    """Weights of a family whose tensors are our parameters under our names.

    Args:
        specs: tree of ParamSpecs.

    >>> from jaxrl_post.models.spec import ParamSpec
    >>> spec = ParamSpec((8, 4), ("embed", "ffn"))
    >>> own_weights({"layers": [{"up": spec}]})["layers.*.up"]
    Weight(name='layers.*.up', layout='embed ffn', ...)
    """
    # What a value model leaves unread where it starts from a language model.
    weights = {"unembedding": Weight("unembedding", "vocab embed")}
    for path, spec in paths(specs).items():
        pattern = re.sub(r"^layers\.\d+\.", "layers.*.", path)
        weights[pattern] = Weight(pattern, " ".join(spec.axes))
    return weights


def open_arrays(directory: Path) -> dict[str, Tensor]:
    """Opens the arrays of a model directory; their values are read when asked for.

    Args:
        directory: of which `is_orbax_directory` is true.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or not one of Orbax's.
    """
    # Imported where it is needed: most programs read safetensors.
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
                    # A chunk that is not there must not read as zeros.
                    "fill_missing_data_reads": False,
                    # Nobody writes here: a chunk in the cache is as good as the file's.
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

    # More than the largest array, which otherwise could never be written.
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
    # TensorStore appends [tensorstore_spec='...'], some thousand characters of JSON.
    return re.split(r" \[\w+='|\n", str(error), maxsplit=1)[0]
