"""Loads a model directory shard by shard, and saves one."""

import itertools
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.models.adapters.lora import merged
from jaxrl_post.models.config import Head, ModelConfig
from jaxrl_post.models.mtp import MTPParams, mtp_config, mtp_specs
from jaxrl_post.models.params import DecoderParams, param_specs
from jaxrl_post.models.spec import abstract, is_spec
from jaxrl_post.pretrained.directory import (
    CONFIG_FILE,
    SavesItself,
    new_model_directory,
    read_config_file,
)
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import (
    Family,
    family_of,
    read_config,
    right_label,
)
from jaxrl_post.pretrained.hf_config import declared_next_token_layers, dtype_name
from jaxrl_post.pretrained.hf_values import section
from jaxrl_post.pretrained.joined_experts import split_experts
from jaxrl_post.pretrained.layout import Weight
from jaxrl_post.pretrained.name_map import (
    Entry,
    entries_of,
    matches,
    paths,
    present,
    some,
    without_prefixes,
)
from jaxrl_post.pretrained.orbax_files import (
    is_orbax_directory,
    open_arrays,
    own_weights,
    write_arrays,
)
from jaxrl_post.pretrained.param_files import (
    check_same,
    check_tensors,
    load_parameter,
    write_parameters,
)
from jaxrl_post.pretrained.peft.beside import adapter_in
from jaxrl_post.pretrained.peft.files import head_of, load_adapter
from jaxrl_post.pretrained.quantized_files import dequantized
from jaxrl_post.pretrained.stored_layers import check_counts, next_token_layers
from jaxrl_post.pretrained.tensor_files import Tensor, has_tensors, open_tensors
from jaxrl_post.pretrained.vision.picture_files import write_processor
from jaxrl_post.pretrained.vision.whole import saved_weights, whole_family
from jaxrl_post.pretrained.weight_health import WeightHealth
from jaxrl_post.sharding import DEFAULT_RULES, Rules, named_shardings
from jaxrl_post.types import Array, PyTree

__all__ = ["Format", "load", "load_mtp", "save", "stored_head"]

# The format of the weights.
type Format = Literal["huggingface", "orbax"]

logger = logging.getLogger(__name__)

# Buffers of old checkpoints; `models.rope` computes them from the config.
HARMLESS = "*rotary_emb.inv_freq"
# Paths of parameters that a checkpoint may lack, or may have without need.
EMBEDDING, UNEMBEDDING = "embedding", "unembedding"
HEADS = ("value_head", "process_head.weight", "process_head.bias")


def load(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    dtype: DTypeLike | None = None,
    head: Head | None = None,
    weights: bool = True,
    vision: bool = False,
) -> tuple[ModelConfig, DecoderParams[Any]]:
    """Loads a model directory in either format of `save`.

    An adapter with its base (`peft.beside`) is merged into it.

    On a mesh each process reads only the regions that its own devices hold. Regions are
    read one after the other, so that the host holds about two tensors (one as stored,
    one converted) in addition to the parameters. Weights in block-wise FP8 or MXFP4 are
    dequantised to the requested dtype.

    Args:
        path: a directory with config.json and safetensors files, or with config.json
            and an Orbax folder `params`.
        mesh: mesh of the parameters; None puts them on JAX's default device.
        rules: mesh axes of every logical axis.
        dtype: dtype of the parameters; default: the dtype in config.json, or float32.
        head: head of the model; default: the checkpoint's head. A language model
            loaded with a value or process head gets a head of zeros, ready to be
            trained as a critic or reward model.
        weights: False reads config.json alone and returns abstract parameters,
            ShapeDtypeStructs, which tell what the model would take.
        vision: whether to load the vision tower of a model that also sees; otherwise
            its text model alone is loaded, and saved.

    Returns:
        (config, params).

    Raises:
        CheckpointError: the directory does not hold a readable model; the message
            names the file or the tensor.
        CheckpointWarning: issued as a warning: weights hold NaN or infinity, matrices
            are all zeros, or a tensor is in two files.
        MeshError: the mesh does not divide the model; raised before weights are read.

    >>> import tempfile
    >>> from jaxrl_post.models import initialize
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> params = initialize(jax.random.key(0), param_specs(config))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/tiny", config, params)
    ...     same_config, same_params = load(f"{folder}/tiny")
    >>> config == same_config
    True
    """
    directory = Path(path)
    raw = read_config_file(directory)
    try:
        config = read_config(raw, vision=vision)
        further = declared_next_token_layers(raw)
        wanted = jnp.dtype(dtype_name(raw) if dtype is None else dtype)
    except ValueError as error:
        raise CheckpointError(f"{directory / CONFIG_FILE}: {error}") from error
    lm, adapter = config.head == "lm", adapter_in(directory)
    head = head or (stored_head(directory) if adapter else None)
    if head is not None:
        _check_head(directory, config.head, head)
        config = replace(config, head=head)
    specs = param_specs(config)
    if not weights:
        return config, abstract(specs, wanted, mesh, rules)
    # A language model has none of these heads; they are created.
    new = set(HEADS) if lm else set()
    with _opened(directory, raw, config) as (family, stored):
        shardings = _shardings(specs, mesh, rules)
        health = WeightHealth()
        tensors = health.watched(stored)
        entries = _entries(family.weights, specs, tensors, new)
        further = next_token_layers(tensors, config.num_layers, further)
        _check(directory, tensors, entries, config, family, lm, further)
        params = _read(specs, tensors, entries, new, shardings, wanted)
        heads = [entry.name for path in HEADS for entry in entries.get(path, ())]
        health.warn(tensors, harmless=heads)
    if config.head == "process" and right_label(raw) == 0:
        params = _with_labels_exchanged(params)
    if adapter is not None:
        lora, values = load_adapter(adapter, config, mesh=mesh, rules=rules)
        params = merged(params, values, config, lora)
    return config, params


def load_mtp(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    dtype: DTypeLike | None = None,
    weights: bool = True,
) -> tuple[ModelConfig, MTPParams[Any]]:
    """Loads the layer for multi-token prediction of a Hugging Face directory.

    Args:
        path: as in `load`; families with such a layer are Qwen3-Next and Qwen3.5.
        mesh: as in `load`.
        rules: as in `load`.
        dtype: as in `load`.
        weights: as in `load`.

    Returns:
        (config, params) of the layer.

    Raises:
        CheckpointError: the directory does not hold a readable layer.
        MeshError: the mesh does not divide the layer.
    """
    directory = Path(path)
    raw = read_config_file(directory)
    try:
        whole = read_config(raw)
        wanted = jnp.dtype(dtype_name(raw) if dtype is None else dtype)
    except ValueError as error:
        raise CheckpointError(f"{directory / CONFIG_FILE}: {error}") from error
    if not family_of(whole.model_type).mtp:
        raise CheckpointError(
            f"{directory}: layers for multi-token prediction are read of Qwen3-Next "
            f"and Qwen3.5 alone; got a {whole.model_type}"
        )
    config = mtp_config(whole)
    specs = mtp_specs(config)
    if not weights:
        return config, abstract(specs, wanted, mesh, rules)
    shardings = _shardings(specs, mesh, rules)
    with _opened(directory, raw, whole) as (family, stored):
        tensors = {n: t for n, t in stored.items() if matches(family.carried, n, 0, 0)}
        if not tensors:
            raise CheckpointError(
                f"{directory}: holds no layer for multi-token prediction: no tensor is "
                f"named {', '.join(family_of(whole.model_type).carried)}; releases "
                "have one, and models saved with such a release as their source"
            )
        entries = _entries(family.mtp_weights, specs, tensors)
        flat = itertools.chain.from_iterable(entries.values())
        check_tensors(tensors, flat, lambda _: False, directory / CONFIG_FILE)
        params = _read(specs, tensors, entries, (), shardings, wanted)
    return config, params


def stored_head(directory: Path) -> Head:
    """Reads the head of a model directory; an adapter's head comes first.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    head, adapter = read_config(read_config_file(directory)).head, adapter_in(directory)
    return (adapter and head_of(adapter)) or head


def save(
    path: str | os.PathLike[str],
    config: ModelConfig,
    params: DecoderParams[Array],
    *,
    tokenizer: SavesItself | None = None,
    source: str | os.PathLike[str] | None = None,
    max_file_bytes: int = 5_000_000_000,
    weights_format: Format = "huggingface",
) -> None:
    """Saves a model directory that `load` can load, and transformers 4 and 5 too.

    Shards are transposed on their devices and fetched one after the other, so that the
    host holds one tensor at a time. Saving is atomic: `path` is complete or does not
    exist. Of several processes all call it, and process 0 writes: each tensor is
    gathered on the devices for as long as that takes.

    Args:
        path: the directory to make; existing files are never overwritten.
        config: the model's config.
        params: in any sharding; stored in their own dtype.
        tokenizer: saved with the model.
        source: a model directory whose special-token ids and generation_config.json
            are copied, and, where the family has them, layers for multi-token
            prediction (`Family.carried`) as they are. Without `source`, config.json has
            no end-of-text token.
        max_file_bytes: limit of tensor bytes per file; larger models get several files.
        weights_format: "orbax" writes the weights as a folder `params` that any program
            with Orbax can read, and transformers cannot. The host then holds a copy of
            the parameters, and a file may exceed its limit by one chunk (4 MiB).

    Raises:
        CheckpointError: `path` is not empty, the parameters do not fit `config`, the
            family's checkpoint format cannot express `config`, or Orbax cannot write.
        ValueError: `max_file_bytes` is smaller than one of Orbax's chunks.
    """
    with new_model_directory(path, config, params, tokenizer, source) as made:
        staging, values = made
        if weights_format == "orbax":
            write_arrays(staging, values, max_file_bytes, path)
            return
        family = family_of(config.model_type)
        weights = saved_weights(config, family)
        entries = entries_of(weights, param_specs(config))
        carried = family.carried if source is not None and staging is not None else ()
        if staging is not None and config.vision is not None:
            origin = None if source is None else Path(source)
            write_processor(staging, config.vision, origin)
        with _carried(Path(source or ""), carried) as others:
            write_parameters(staging, entries, values, max_file_bytes, others)


@contextmanager
def _carried(directory: Path, patterns: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Opens the tensors of a model directory that are saved again as they are."""
    if not patterns or not has_tensors(directory):
        yield {}
        return
    with open_tensors(directory) as tensors:
        yield {
            name: tensor
            for name, tensor in tensors.items()
            if matches(patterns, name, num_layers=0, further_layers=0)
        }


def _entries(
    weights: Mapping[str, Weight],
    specs: PyTree,
    tensors: Collection[str],
    new: Collection[str] = (),
) -> dict[str, list[Entry]]:
    """The entries of all parameters by path, without those that are made."""
    entries: dict[str, list[Entry]] = {}
    for entry in present(entries_of(weights, specs), tensors):
        if entry.path not in new:
            entries.setdefault(entry.path, []).append(entry)
    return entries


def _shardings(specs: PyTree, mesh: Mesh | None, rules: Rules) -> list[Any]:
    """The shardings of all parameters in order, None on one device."""
    if mesh is None:
        return [None] * len(paths(specs))
    return jax.tree.leaves(named_shardings(specs, mesh, rules))


def _read(
    specs: PyTree,
    tensors: Mapping[str, Tensor],
    entries: Mapping[str, list[Entry]],
    new: Collection[str],
    shardings: list[Any],
    dtype: jnp.dtype,
) -> Any:
    """Reads parameters from their tensors; those that are made are zeros."""
    leaves = [
        jnp.zeros(spec.shape, dtype, device=sharding)
        if name in new
        else load_parameter(
            tensors, entries[name], sharding, jnp.dtype(spec.dtype(dtype))
        )
        for (name, spec), sharding in zip(paths(specs).items(), shardings, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def _check_head(directory: Path, stored: Head, wanted: Head) -> None:
    # Value and process heads share tensor names, so `check_tensors` cannot detect this.
    if stored not in ("lm", wanted) and "process" in (stored, wanted):
        raise CheckpointError(
            f"{directory}: holds a model with head={stored!r}, which cannot become one "
            f"with head={wanted!r}; give a language model"
        )


def _with_labels_exchanged(params: DecoderParams[Array]) -> DecoderParams[Array]:
    def flip(leaf: Array) -> Array:
        return jax.jit(jnp.flipud, out_shardings=leaf.sharding)(leaf)

    return params.replace(process_head=jax.tree.map(flip, params.process_head))  # type: ignore[attr-defined]


@contextmanager
def _opened(
    directory: Path, raw: dict[str, Any], config: ModelConfig
) -> Iterator[tuple[Family, dict[str, Tensor]]]:
    """Opens the language model's dequantised tensors, with a family that maps them.

    Raises if the config has more layers or experts than the tensors.
    """
    family, config_file = family_of(config.model_type), directory / CONFIG_FILE
    family = whole_family(config, family)
    if is_orbax_directory(directory):
        tensors = open_arrays(directory)
        check_counts(tensors, config, {}, config_file)
        weights = own_weights(param_specs(config))
        yield replace(family, weights=weights, prefixes=(), ignored=()), tensors
        return
    with open_tensors(directory) as stored:
        # Kimi K2.5 describes the text model's quantisation in its text_config.
        places = (raw, section(raw, "text_config"))
        found = (place.get("quantization_config") for place in places)
        method = next((each for each in found if each is not None), None)
        tensors = dequantized(stored, method, config_file)
        tensors = without_prefixes(tensors, family.prefixes)
        tensors = _without_vision(directory, tensors, family)
        tensors = split_experts(tensors, family.weights)
        check_counts(tensors, config, family.weights, config_file)
        yield family, tensors


def _without_vision(
    directory: Path, tensors: dict[str, Tensor], family: Family
) -> dict[str, Tensor]:
    """Returns the text model's tensors; logs how many others are left out."""
    text = {
        name: tensor
        for name, tensor in tensors.items()
        if not matches(family.vision, name, num_layers=0, further_layers=0)
    }
    if len(text) < len(tensors):
        logger.warning(
            "%s: a model that also sees; its text model alone is read and will be "
            "saved, %d tensors of its vision part are left out; --vision loads "
            "those that are supported",
            directory,
            len(tensors) - len(text),
        )
    return text


def _check(
    directory: Path,
    tensors: dict[str, Tensor],
    entries: dict[str, list[Entry]],
    config: ModelConfig,
    family: Family,
    lm: bool,
    further_layers: int,
) -> None:
    """Compares the tensors with the config; `lm`: they are a language model's."""
    spare: set[str] = set()
    if config.tie_embeddings or (lm and not config.predicts_tokens):
        head = family.weights[UNEMBEDDING]
        spare = {head.name, *head.also}
    layers = config.num_layers, further_layers
    ignored = *family.ignored, *family.unused(config)
    beside = [name for name in tensors if matches(ignored, name, *layers)]
    if beside:
        logger.warning(
            "%s: %s: not part of the policy, such as layers for multi-token "
            "prediction; they are not trained, and %s",
            directory,
            some(beside),
            "saved as they are" if family.carried else "not saved",
        )

    def harmless(name: str) -> bool:
        return name in spare or matches((HARMLESS, *ignored), name, *layers)

    flat = itertools.chain.from_iterable(entries.values())
    check_tensors(tensors, flat, harmless, directory / CONFIG_FILE)
    if config.tie_embeddings:
        [embedding] = entries[EMBEDDING]
        for tied in spare & tensors.keys():
            check_same(tensors, embedding.name, tied, directory / CONFIG_FILE)
