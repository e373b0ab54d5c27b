"""Checkpoints in Hugging Face's format, tensor by tensor into shards and back."""

import functools
import json
import os
import shutil
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl_post.models.config import Head, ModelConfig
from jaxrl_post.models.decoder import DecoderParams, param_specs
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.families import Family, family_of, read_config, write_config
from jaxrl_post.models.hf_config import dtype_name
from jaxrl_post.models.layout import Layout
from jaxrl_post.models.spec import is_spec
from jaxrl_post.models.tensor_files import (
    StoredTensor,
    TensorFiles,
    read_json,
    write_tensors,
)
from jaxrl_post.sharding import DEFAULT_RULES, Rules, named_shardings
from jaxrl_post.types import Array, PyTree

__all__ = ["SavesItself", "load_pretrained", "save_pretrained"]

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Recomputed from the config; old checkpoints carry them all the same.
HARMLESS = "rotary_emb.inv_freq"
EMBEDDING, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
VALUE_HEAD = "score.weight"
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")

# Bytes compared at a time where a tied matrix was stored twice.
COMPARED_BYTES = 1 << 24


@runtime_checkable
class SavesItself(Protocol):
    """What `save_pretrained` needs of a tokenizer."""

    def save(self, directory: Path) -> Any:
        """Writes the tokenizer's files into a directory."""
        ...


@dataclass(frozen=True)
class _Entry:
    """A parameter, its tensor's name on disk, and the layout between them."""

    path: str
    name: str
    layout: Layout


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    dtype: DTypeLike | None = None,
    head: Head | None = None,
) -> tuple[ModelConfig, DecoderParams[Array]]:
    """Reads a Llama, Qwen2 or Qwen3 checkpoint.

    Under a mesh each process reads the regions that its own devices hold and no others.
    Tensors are read one after the other, so that beside the parameters themselves the
    host holds about two tensors (one as stored, one converted).

    Args:
        path: a directory with config.json and safetensors files.
        mesh: where the parameters go; None puts them on JAX's default device.
        rules: logical axis to mesh axes.
        dtype: of the parameters; default: what config.json says, else float32.
        head: of the model; default: the checkpoint's. A language model read with a
            value head gets one of zeros: a critic or reward model before its training.

    Returns:
        (config, params).

    Raises:
        CheckpointError: the directory does not hold a model that can be read; the
            message names the file or the tensor.
        MeshError: the mesh does not divide the model; no weight has been read then.

    >>> import tempfile
    >>> from jaxrl_post.models import initialize
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> params = initialize(jax.random.key(0), param_specs(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(f"{folder}/tiny", config, params)
    ...     same_config, same_params = load_pretrained(f"{folder}/tiny")
    >>> config == same_config
    True
    """
    directory = Path(path)
    raw = _config_of(directory)
    try:
        config = read_config(raw)
        wanted = jnp.dtype(dtype_name(raw) if dtype is None else dtype)
    except ValueError as error:
        raise CheckpointError(f"{directory / CONFIG_FILE}: {error}") from error
    # Of a language model: without a value head, and with a matrix that no value needs.
    new = {VALUE_HEAD} if config.head == "lm" else set()
    unused = UNEMBEDDING if config.head == "lm" and head == "value" else None
    config = replace(config, head=head or config.head)
    specs = param_specs(config)
    entries = _entries(family_of(config.model_type), specs)
    shardings = [None] * len(entries)
    if mesh is not None:
        shardings = jax.tree.leaves(named_shardings(specs, mesh, rules))
    with TensorFiles.open(directory) as files:
        stored = [entry for entry in entries if entry.name not in new]
        _check(directory, files, stored, config, unused)
        leaves = [
            _zeros(entry, sharding, wanted)
            if entry.name in new
            else _load(files, entry, sharding, wanted)
            for entry, sharding in zip(entries, shardings, strict=True)
        ]
    structure = jax.tree.structure(specs, is_leaf=is_spec)
    return config, jax.tree.unflatten(structure, leaves)


def save_pretrained(
    path: str | os.PathLike[str],
    config: ModelConfig,
    params: DecoderParams[Array],
    *,
    tokenizer: SavesItself | None = None,
    source: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint that `load_pretrained` and transformers 4 and 5 read.

    Tensors are laid out for disk on the devices and fetched one after the other, so
    that the host holds one of them at a time. The directory appears complete, under its
    name, or not at all.

    Args:
        path: the directory to make; what stands there is never overwritten.
        config: of the model.
        params: in any sharding that this process can read; stored in their own dtype.
        tokenizer: written beside the model.
        source: a checkpoint directory whose special-token ids and
            generation_config.json are carried over. Without it config.json names no
            token that ends a text.
        max_file_bytes: tensor bytes in a file; more is split into numbered files.

    Raises:
        CheckpointError: `path` is taken, the parameters are not those of `config`, or
            no checkpoint of the family can say what `config` says.
    """
    target = Path(path).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: already there; remove it or save elsewhere")
    raw = write_config(config)
    entries = _entries(family_of(config.model_type), param_specs(config))
    values = _match(entries, params)
    dtype = values[EMBEDDING].dtype.name
    raw |= {"dtype": dtype, "torch_dtype": dtype, **_special_tokens(source)}
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    staging.mkdir(parents=True)
    try:
        _write_values(staging, entries, values, max_file_bytes)
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
        if source is not None and (Path(source) / GENERATION_FILE).is_file():
            shutil.copyfile(Path(source) / GENERATION_FILE, staging / GENERATION_FILE)
        if tokenizer is not None:
            tokenizer.save(staging)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _config_of(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: no such directory; models are read from disk, so download "
            f"first: hf download NAME --local-dir DIRECTORY"
        )
    if not (directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{directory}: no {CONFIG_FILE}; this is not a checkpoint directory"
        )
    return read_json(directory / CONFIG_FILE)


def _special_tokens(source: str | os.PathLike[str] | None) -> dict[str, Any]:
    # Explicit nulls: transformers' default ids are those of Llama 2.
    raw = {} if source is None else _config_of(Path(source))
    return {key: raw.get(key) for key in SPECIAL_TOKENS}


def _paths(tree: PyTree) -> dict[str, Any]:
    """Leaves by their path, such as "layers.0.attention.query"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {keystr(path): leaf for path, leaf in leaves}


def _entries(family: Family, specs: PyTree) -> list[_Entry]:
    entries = []
    for path, spec in _paths(specs).items():
        head, *rest = path.split(".")
        layer = rest[0] if head == "layers" else ""
        pattern = ".".join(["layers.*", *rest[1:]]) if layer else path
        weight = family.weights[pattern]
        layout = Layout.of(weight.layout, spec.axes, spec.shape)
        entries.append(_Entry(path, weight.name.replace("*", layer), layout))
    return entries


def _check(
    directory: Path,
    files: TensorFiles,
    entries: list[_Entry],
    config: ModelConfig,
    unused: str | None,
) -> None:
    """Compares what is there with what the config asks for, before anything is read."""
    expected, found = {entry.name for entry in entries}, files.names
    surplus = {name for name in found - expected if not name.endswith(HARMLESS)}
    if unused is not None:
        surplus.discard(unused)
    if config.tie_embeddings:
        surplus.discard(UNEMBEDDING)
    missing = expected - found
    if missing or surplus:
        parts = [f"missing tensors: {_some(missing)}"] if missing else []
        parts += [f"unknown tensors: {_some(surplus)}"] if surplus else []
        raise CheckpointError(
            f"{directory}: the weights do not belong to {CONFIG_FILE}; "
            f"{'; '.join(parts)}"
        )
    for entry in entries:
        _check_tensor(files, entry)
    if config.tie_embeddings and UNEMBEDDING in found:
        _check_tied(files)


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    more = f", ... ({len(names)} in all)" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _check_tensor(files: TensorFiles, entry: _Entry) -> None:
    shape, expected = files.shape(entry.name), entry.layout.stored_shape
    if shape != expected:
        raise CheckpointError(
            f"{files.file(entry.name)}: tensor {entry.name} has shape {shape}, but "
            f"{CONFIG_FILE} asks for {expected}"
        )
    if files.dtype(entry.name) not in READABLE_DTYPES:
        raise CheckpointError(
            f"{files.file(entry.name)}: tensor {entry.name} has dtype "
            f"{files.dtype(entry.name)}; readable are {', '.join(READABLE_DTYPES)}"
        )


def _check_tied(files: TensorFiles) -> None:
    """Refuses an output matrix of its own where the config says that it is tied."""
    shape = files.shape(EMBEDDING)
    same = files.shape(UNEMBEDDING) == shape
    rows = max(1, COMPARED_BYTES // (8 * shape[1]))
    for start in range(0, shape[0] if same else 0, rows):
        region = (slice(start, min(start + rows, shape[0])), slice(0, shape[1]))
        left, right = (files.fetch(n, region) for n in (EMBEDDING, UNEMBEDDING))
        same = same and np.array_equal(left, right)
    if not same:
        raise CheckpointError(
            f"{files.file(UNEMBEDDING)}: {UNEMBEDDING} differs from {EMBEDDING}, but "
            f"tie_word_embeddings is true; set it to false in {CONFIG_FILE} to use both"
        )


def _load(
    files: TensorFiles, entry: _Entry, sharding: NamedSharding | None, dtype: jnp.dtype
) -> Array:
    """Reads one parameter and waits until it is on its devices."""
    fetch = functools.partial(files.fetch, entry.name)
    shape = entry.layout.shape

    # Replicas of a shard are neither read nor held twice.
    @functools.cache
    def shard(index: tuple[slice, ...]) -> np.ndarray:
        return np.ascontiguousarray(entry.layout.read(fetch, index), dtype=dtype)

    if sharding is None:
        value = jax.device_put(shard((slice(None),) * len(shape)))
    else:
        value = jax.make_array_from_callback(shape, sharding, shard, dtype=dtype)
    return value.block_until_ready()


def _zeros(entry: _Entry, sharding: NamedSharding | None, dtype: jnp.dtype) -> Array:
    return jnp.zeros(entry.layout.shape, dtype, device=sharding)


def _match(entries: list[_Entry], params: DecoderParams[Array]) -> dict[str, Array]:
    """Parameters by tensor name, after a look at whether they are the config's."""
    found = _paths(params)
    expected = {entry.path for entry in entries}
    if found.keys() != expected:
        raise CheckpointError(
            f"params: not those of the config; missing: "
            f"{_some(expected - found.keys()) or 'none'}; surplus: "
            f"{_some(found.keys() - expected) or 'none'}"
        )
    for entry in entries:
        value = found[entry.path]
        if value.shape != entry.layout.shape:
            raise CheckpointError(
                f"params: {entry.path} has shape {value.shape}, but the config asks "
                f"for {entry.layout.shape}"
            )
        if not value.is_fully_addressable:
            raise CheckpointError(
                f"params: {entry.path} is spread over several processes; move it to "
                f"one that can read all of it before saving"
            )
    return {entry.name: found[entry.path] for entry in entries}


def _write_values(
    directory: Path,
    entries: list[_Entry],
    values: dict[str, Array],
    max_file_bytes: int,
) -> None:
    layouts = {entry.name: entry.layout for entry in entries}
    tensors = [
        StoredTensor(name, layout.stored_shape, values[name].dtype.name)
        for name, layout in layouts.items()
    ]

    def fetch(name: str) -> np.ndarray:
        return np.asarray(_stored(layouts[name], values[name]))

    write_tensors(directory, tensors, fetch, max_file_bytes)


@functools.partial(jax.jit, static_argnums=0)
def _stored(layout: Layout, value: Array) -> Array:
    """The parameter as it goes to disk.

    Always a new array: NumPy's view of a `jax.Array` stays cached on it, and caching
    the whole model on the host is what this avoids.
    """
    return layout.write(value)
