"""Checkpoints in Hugging Face's format, tensor by tensor into shards and back."""

import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.models.config import Head, ModelConfig
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.families import Family, family_of, read_config, write_config
from jaxrl_post.models.hf_config import dtype_name
from jaxrl_post.models.name_map import (
    Entry,
    entries_of,
    matches,
    paths,
    present,
    some,
    without_prefixes,
)
from jaxrl_post.models.param_files import (
    check_same,
    check_tensors,
    load_parameter,
    write_parameters,
)
from jaxrl_post.models.params import DecoderParams, param_specs
from jaxrl_post.models.quantized_files import dequantized
from jaxrl_post.models.spec import is_spec
from jaxrl_post.models.tensor_files import Tensor, open_tensors, read_json
from jaxrl_post.sharding import DEFAULT_RULES, Rules, named_shardings
from jaxrl_post.types import Array

__all__ = ["SavesItself", "load_pretrained", "save_pretrained"]

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Recomputed from the config; old checkpoints carry them all the same.
HARMLESS = "*rotary_emb.inv_freq"
# Our paths of what a checkpoint may lack or have for nothing.
EMBEDDING, UNEMBEDDING, VALUE_HEAD = "embedding", "unembedding", "value_head"


@runtime_checkable
class SavesItself(Protocol):
    """What `save_pretrained` needs of a tokenizer."""

    def save(self, directory: Path) -> Any:
        """Writes the tokenizer's files into a directory."""
        ...


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    dtype: DTypeLike | None = None,
    head: Head | None = None,
) -> tuple[ModelConfig, DecoderParams[Array]]:
    """Reads a checkpoint of one of the families.

    Under a mesh each process reads the regions that its own devices hold and no others.
    They are read one after the other, so that beside the parameters themselves the host
    holds about two tensors (one as stored, one converted). Weights in block-wise FP8 or
    MXFP4 become numbers of the dtype asked for.

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
    lm = config.head == "lm"
    config = replace(config, head=head or config.head)
    family, specs = family_of(config.model_type), param_specs(config)
    wanted_specs = paths(specs)
    shardings = [None] * len(wanted_specs)
    if mesh is not None:
        shardings = jax.tree.leaves(named_shardings(specs, mesh, rules))
    # A value head on a language model is new.
    new = {VALUE_HEAD} if lm else set()
    with _tensors(directory, raw, family) as tensors:
        entries: dict[str, list[Entry]] = {}
        for entry in present(entries_of(family.weights, specs), tensors):
            if entry.path not in new:
                entries.setdefault(entry.path, []).append(entry)
        _check(directory, tensors, entries, config, family, lm)
        leaves = [
            jnp.zeros(spec.shape, wanted, device=sharding)
            if name in new
            else load_parameter(
                tensors, entries[name], sharding, jnp.dtype(spec.dtype(wanted))
            )
            for (name, spec), sharding in zip(
                wanted_specs.items(), shardings, strict=True
            )
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

    Shards are laid out for disk on their devices and fetched one after the other, so
    that the host holds one tensor at a time. The directory appears complete, under its
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
    entries = entries_of(family_of(config.model_type).weights, param_specs(config))
    values = _match(config, params)
    dtype = values[EMBEDDING].dtype.name
    raw |= {"dtype": dtype, "torch_dtype": dtype, **_special_tokens(source)}
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    staging.mkdir(parents=True)
    try:
        write_parameters(staging, entries, values, max_file_bytes)
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
    inner = raw.get("text_config") or {}
    return {key: raw.get(key, inner.get(key)) for key in SPECIAL_TOKENS}


@contextmanager
def _tensors(
    directory: Path, raw: dict[str, Any], family: Family
) -> Iterator[dict[str, Tensor]]:
    """The language model's tensors, unquantised, under the family's names."""
    quantization = raw.get("quantization_config")
    with open_tensors(directory) as stored:
        tensors = dequantized(stored, quantization, directory / CONFIG_FILE)
        yield without_prefixes(tensors, family.prefixes)


def _check(
    directory: Path,
    tensors: dict[str, Tensor],
    entries: dict[str, list[Entry]],
    config: ModelConfig,
    family: Family,
    lm: bool,
) -> None:
    """Compares the tensors with the config; `lm` says that they have no value head."""
    spare: set[str] = set()
    if config.tie_embeddings or (lm and config.head == "value"):
        head = family.weights[UNEMBEDDING]
        spare = {head.name, *head.also}
    ignored = (HARMLESS, *family.ignored)

    def harmless(name: str) -> bool:
        return name in spare or matches(ignored, name, config.num_layers)

    flat = itertools.chain.from_iterable(entries.values())
    check_tensors(tensors, flat, harmless, directory / CONFIG_FILE)
    if config.tie_embeddings:
        [embedding] = entries[EMBEDDING]
        for tied in spare & tensors.keys():
            check_same(tensors, embedding.name, tied, directory / CONFIG_FILE)


def _match(config: ModelConfig, params: DecoderParams[Array]) -> dict[str, Array]:
    """Parameters by path, after a look at whether they are the config's."""
    found, expected = paths(params), paths(param_specs(config))
    if found.keys() != expected.keys():
        raise CheckpointError(
            f"params: not those of the config; missing: "
            f"{some(expected.keys() - found.keys()) or 'none'}; surplus: "
            f"{some(found.keys() - expected.keys()) or 'none'}"
        )
    for path, spec in expected.items():
        value = found[path]
        if value.shape != spec.shape:
            raise CheckpointError(
                f"params: {path} has shape {value.shape}, but the config asks for "
                f"{spec.shape}"
            )
        if not value.is_fully_addressable:
            raise CheckpointError(
                f"params: {path} is spread over several processes; move it to one that "
                f"can read all of it before saving"
            )
    return found
