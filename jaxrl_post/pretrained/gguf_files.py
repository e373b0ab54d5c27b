"""Reads a GGUF file, and writes its model as a Hugging Face directory.

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is the format of
llama.cpp: config, tokenizer and weights, mostly quantised, in one file. The library
`gguf` reads and dequantises it. Keys of the architecture and tensors that are unknown
here would make another model, so a file that has them is refused.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.extras import install
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.params import param_specs
from jaxrl_post.pretrained.directory import (
    CONFIG_FILE,
    GENERATION_FILE,
    SPECIAL_TOKENS,
    SavesItself,
    staged,
)
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import family_of, read_config, write_config
from jaxrl_post.pretrained.hf_values import Json, integer, number, text
from jaxrl_post.pretrained.name_map import Entry, entries_of, some
from jaxrl_post.pretrained.tensor_files import StoredTensor, write_tensors

__all__ = ["GGUFFile", "read_gguf", "write_gguf"]

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Keys of an architecture that are read, or that change nothing.
KEYS = (
    "vocab_size", "context_length", "embedding_length", "block_count",
    "feed_forward_length", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count",
    "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "tensor_data_layout",
)  # fmt: skip
# Keys that change nothing if they are 0.
EXPERT_KEYS = ("expert_count", "expert_used_count")

# Divisors of the rotary frequencies, as Llama 3.1 scales them.
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose header has been read and checked.

    Attributes:
        path: the file.
        metadata: its keys and values; float32 numbers as the shortest decimal ones.
        config: the model's config.
        tensors: the library's tensors, quantised and not read yet, with their entries
            in a Hugging Face directory.
    """

    path: Path
    metadata: Mapping[str, Any]
    config: ModelConfig
    tensors: tuple[tuple[Entry, Any], ...]

    @property
    def dtype(self) -> str:
        """The narrowest dtype that holds every matrix: bfloat16 or float32."""
        kinds = {stored.tensor_type.name for _, stored in self.tensors}
        return "bfloat16" if kinds <= {"BF16", "F32"} and "BF16" in kinds else "float32"


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Reads the header of a GGUF file; tensors are dequantised by `write_gguf`.

    Supported are the architectures llama, qwen2 and qwen3 without experts, and every
    quantisation that the library can undo.

    Args:
        path: the file.

    Raises:
        CheckpointError: the extra is not installed; the file is none, is damaged, is a
            part of several, or no language model; or it has an architecture, a key, a
            tensor or a quantisation that is not supported. The message names it.
    """
    path = Path(path)
    gguf = _library(path)
    try:
        reader = _opened(path)
        metadata = {
            name: _value(field)
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        _check_kind(metadata, reader)
        architecture = metadata["general.architecture"]
        found = {tensor.name: tensor for tensor in reader.tensors}
        config = read_config(_config(metadata, architecture, found))
        names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH[architecture.upper()], config.num_layers
        )
        weights = family_of(config.model_type).weights
        entries = {
            names.get_name(entry.name, (".weight", ".bias")): entry
            for entry in entries_of(weights, param_specs(config))
        }
        _check_tensors(found, entries)
        tensors = tuple((entry, found[name]) for name, entry in entries.items())
    # Exceptions of the library for a damaged header, and our own.
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return GGUFFile(path, metadata, config, tensors)


def write_gguf(
    path: str | os.PathLike[str],
    file: GGUFFile,
    *,
    tokenizer: SavesItself,
    generation: Json,
    dtype: str | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> tuple[int, str]:
    """Writes a GGUF file's model as a Hugging Face directory, whole or not at all.

    Tensors are dequantised one after the other, so that the host holds one in float32.

    Args:
        path: the directory to make; existing files are never overwritten.
        file: from `read_gguf`.
        tokenizer: saved with the model.
        generation: content of generation_config.json; config.json gets its special
            tokens.
        dtype: "float32" or "bfloat16"; None for `file.dtype`.
        max_file_bytes: limit of tensor bytes per file; larger models get several files.

    Returns:
        (number of parameters, their dtype).

    Raises:
        CheckpointError: `path` is not empty.
    """
    dtype = dtype or file.dtype
    special = {key: generation.get(key) for key in SPECIAL_TOKENS}
    raw = write_config(file.config) | {"dtype": dtype, "torch_dtype": dtype, **special}
    sources = {entry.name: stored for entry, stored in file.tensors}
    tensors = [StoredTensor(e.name, e.shape, dtype) for e, _ in file.tensors]

    def source(name: str) -> np.ndarray:
        return _hf_values(name, sources[name], file.config).astype(dtype)

    with staged(path) as staging:
        if staging is not None:
            for name, content in ((CONFIG_FILE, raw), (GENERATION_FILE, generation)):
                written = json.dumps(content, indent=2, sort_keys=True) + "\n"
                (staging / name).write_text(written, encoding="utf-8")
            tokenizer.save(staging)
            write_tensors(staging, tensors, source, max_file_bytes)
    return sum(stored.n_elements for _, stored in file.tensors), dtype


def _library(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{path}: a GGUF file is read by the library gguf, and there is no "
            f"{error.name}; {install('gguf')}"
        ) from error
    return gguf


def _opened(path: Path) -> Any:
    gguf = _library(path)

    class Reader(gguf.GGUFReader):
        """The library's reader, made to stop at the end of the file."""

        def _get(
            self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None
        ) -> Any:
            end, size = offset + np.dtype(dtype).itemsize * int(count), len(self.data)
            if end > size:
                raise ValueError(
                    f"truncated or damaged: it has {size} bytes, and the header asks "
                    f"for byte {end}; fetch it again"
                )
            return super()._get(offset, dtype, count, override_order)

    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(
                    "is a file, but no GGUF file; models are GGUF files or directories"
                )
        with np.errstate(over="raise"):
            return Reader(path)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error


def _value(field: Any) -> Any:
    value = field.contents()
    # 1e-5 as float32 is 0.00000999999974737875.
    short = isinstance(value, float) and field.types[0].name == "FLOAT32"
    return float(str(np.float32(value))) if short else value


def _check_kind(metadata: Json, reader: Any) -> None:
    """Refuses files that are no whole language model."""
    if reader.endianess.name != "LITTLE":
        raise CheckpointError("is big-endian, and only little-endian files are read")
    kind = text(metadata, "general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"general.type is {kind!r}, and only files of a whole 'model' are read"
        )
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise CheckpointError(
            f"is one of {parts} parts (split.count); join them first: llama-gguf-split "
            "--merge FIRST_PART WHOLE_FILE"
        )
    architecture = text(metadata, "general.architecture", "")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"general.architecture is {architecture!r}, and only "
            f"{', '.join(ARCHITECTURES)} are read from GGUF; take the model's Hugging "
            "Face directory"
        )
    if not reader.tensors:
        raise CheckpointError("holds a vocabulary alone, and no tensors")


def _config(metadata: Json, architecture: str, tensors: Mapping[str, Any]) -> Json:
    """Converts the metadata to the content of config.json."""
    prefix = f"{architecture}."
    own = {
        name.removeprefix(prefix) for name in metadata if name.startswith(prefix)
    } - {name for name in EXPERT_KEYS if metadata.get(prefix + name) == 0}
    if own - set(KEYS):
        raise CheckpointError(
            f"not supported: {some({prefix + name for name in own - set(KEYS)})}"
        )
    hidden = integer(metadata, prefix + "embedding_length")
    heads = integer(metadata, prefix + "attention.head_count")
    head_dim = integer(metadata, prefix + "attention.key_length", hidden // heads or 1)
    for name in ("attention.value_length", "rope.dimension_count"):
        size = integer(metadata, prefix + name, head_dim)
        if size != head_dim:
            raise CheckpointError(
                f"{prefix}{name} must be {head_dim}, the size of a head; got {size}"
            )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise CheckpointError("tokenizer.ggml.tokens is missing")
    theta = number(metadata, prefix + "rope.freq_base", 10000.0)
    return {
        "model_type": architecture,
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": integer(metadata, prefix + "feed_forward_length"),
        "num_hidden_layers": integer(metadata, prefix + "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer(
            metadata, prefix + "attention.head_count_kv", heads
        ),
        "head_dim": head_dim,
        "max_position_embeddings": integer(metadata, prefix + "context_length"),
        "rms_norm_eps": number(metadata, prefix + "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(
            metadata, prefix, theta, head_dim, tensors.get(ROPE_DIVISORS)
        ),
    }


def _rope_scaling(
    metadata: Json, prefix: str, theta: float, head_dim: int, divisors: Any
) -> dict[str, Any] | None:
    prefix += "rope.scaling."
    kind = text(metadata, prefix + "type", "none")
    if divisors is not None:
        if kind != "none":
            raise CheckpointError(
                f"{prefix}type must be 'none' with {ROPE_DIVISORS}; got {kind!r}"
            )
        values = divisors.data.astype(np.float64).reshape(-1)
        if values.size != head_dim // 2:
            raise CheckpointError(
                f"{ROPE_DIVISORS} must have {head_dim // 2} values; got {values.size}"
            )
        return _llama3(values, theta)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{prefix}type must be 'none', 'linear' or 'yarn'; got {kind!r}"
        )
    scaling = {"rope_type": kind, "factor": number(metadata, prefix + "factor")}
    if kind == "yarn":
        original = integer(metadata, prefix + "original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(divisors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The parameters of Llama 3.1's scaling, from which the divisors were computed.

    A frequency that turns `turns` times in the original context is divided by 1 /
    (smooth + (1 - smooth) / factor), smooth = (turns - low) / (high - low) between 0
    and 1. Only two quotients of original, low and high count, so low is 1.
    """
    if np.all(divisors == 1.0):
        return None
    least, factor = divisors.min(), divisors.max()
    if least == 1.0 and np.isfinite(factor):
        turns = theta ** -(np.arange(divisors.size) / divisors.size) / (2 * np.pi)
        smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
        if between.sum() >= 2:
            slope, start = np.polyfit(turns[between], smooth[between], 1)
            found = [(round(1 - 1 / start, 3), round(-slope / start))]
        else:
            # Small heads have few frequencies, which many pairs explain.
            found = [
                (1 + (original * turn - 1) / share if between.any() else 4.0, original)
                for original in (8192, *(2**power for power in range(24)))
                for turn, share in [(turns[between].sum(), smooth[between].sum())]
            ]
        for high, original in found:
            if high <= 1:
                continue
            again = np.clip((original * turns - 1) / (high - 1), 0, 1)
            if np.allclose(again, smooth, atol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": float(str(np.float32(factor))),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": float(high),
                    "original_max_position_embeddings": original,
                }
    raise CheckpointError(
        f"{ROPE_DIVISORS} does not scale as Llama 3.1 does: {divisors[:4]} ..."
    )


def _check_tensors(found: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """Refuses tensors that are missing, unknown, of another shape, or not readable."""
    missing, surplus = entries.keys() - found, found.keys() - entries - {ROPE_DIVISORS}
    if missing:
        raise CheckpointError(f"missing tensors: {some(missing)}")
    if surplus:
        raise CheckpointError(f"tensors that are not supported: {some(surplus)}")
    tried = set()
    for name, entry in entries.items():
        shape = tuple(reversed(found[name].shape.tolist()))
        if shape != entry.shape:
            raise CheckpointError(
                f"tensor {name} has shape {shape}, but the keys ask for {entry.shape}"
            )
        kind = found[name].tensor_type
        if kind not in tried:
            tried.add(kind)
            try:
                _dequantized(found[name].data[:1], kind)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"tensor {name} has the type {kind.name}, which the library gguf "
                    "cannot dequantise"
                ) from error


def _dequantized(data: np.ndarray, kind: Any) -> np.ndarray:
    import gguf

    return gguf.dequantize(data, kind)


def _hf_values(name: str, stored: Any, config: ModelConfig) -> np.ndarray:
    """A tensor's values, float32, as a Hugging Face directory has them."""
    values = _dequantized(stored.data, stored.tensor_type)
    rotated = re.search(r"\.self_attn\.([qk])_proj\.weight$", name)
    if config.model_type != "llama" or rotated is None:
        return values
    # llama.cpp rotates neighbouring dims of a head in this architecture; its files have
    # row i of the first half of a head before row i of the second.
    heads = config.num_heads if rotated[1] == "q" else config.num_kv_heads
    pairs = values.reshape(heads, config.head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)
