"""Reads regions of tensors from safetensors files and writes tensors one at a time.

Reading uses the safetensors library, which maps the files into memory and copies only
the requested regions. Writing does not use it, because its `save_file` needs all
tensors of a file in memory at once. The format is a length, a JSON header and the
tensors back to back (https://github.com/huggingface/safetensors#format). The header
follows from shapes and dtypes, so it is written before the first tensor is fetched.
"""

import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl_post.jsonl import json_file
from jaxrl_post.pretrained.errors import CheckpointError, CheckpointWarning
from jaxrl_post.pretrained.layout import Fetch, Index

__all__ = [
    "STORED_DTYPES",
    "StoredTensor",
    "Tensor",
    "has_tensors",
    "open_tensors",
    "read_json",
    "write_tensors",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PLAIN_FILE = r"[^/\\\0]+\.safetensors"
# Any call of the file system with a longer name raises an OSError.
LONGEST_NAME = 255

# The format's names of dtypes by NumPy's names.
STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

# The library (0.8.0) cannot return these dtypes as NumPy arrays, so their bytes are
# read from the file. `quantized_files` multiplies them by their scales.
RAW_DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class Tensor:
    """A tensor on disk, or one computed region by region from tensors on disk.

    Attributes:
        file: the file that holds the tensor.
        shape: the tensor's shape.
        dtype: dtype of the fetched values, by the format's name, such as "BF16".
        fetch: copies a region into memory; every slice has both its bounds.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    fetch: Fetch


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to be written: its name, shape and NumPy's name of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 2)


def has_tensors(directory: Path) -> bool:
    """Whether a directory has tensors that `open_tensors` opens."""
    return any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


@contextmanager
def open_tensors(directory: Path) -> Iterator[dict[str, Tensor]]:
    """Opens model.safetensors, or the shards that the index names.

    Yields:
        All tensors by name. Only the files' headers have been read. The tensors can be
        read only inside the context.

    Raises:
        CheckpointError: neither file exists; a shard is missing, damaged or lacks a
            tensor that the index names; the index names a path outside the directory.
    """
    promised = _locate(directory)
    tensors: dict[str, Tensor] = {}
    twice: set[str] = set()
    with ExitStack() as stack:
        for path in sorted(promised):
            found = _tensors(path, stack.enter_context(_open(path)))
            _check_promise(path, promised[path], set(found))
            twice |= tensors.keys() & found.keys()
            # If two files hold a tensor, take it from the file that the index names.
            tensors |= {
                name: tensor
                for name, tensor in found.items()
                if name not in tensors or name in promised[path]
            }
        _warn_of_copies(directory, twice)
        yield tensors


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: the file cannot be read or does not hold a JSON object.
    """
    try:
        content = json_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; got {content!r:.80}")
    return content


def write_tensors(
    directory: Path,
    tensors: Sequence[StoredTensor],
    source: Callable[[str], np.ndarray],
    max_file_bytes: int,
) -> None:
    """Writes tensors one after the other, split into files of a limited size.

    Args:
        directory: an existing directory without a model.
        tensors: the tensors in the order of writing.
        source: returns a whole tensor by name; called once per tensor, in this order.
        max_file_bytes: bytes of tensor data per file; a larger tensor gets its own.

    Raises:
        CheckpointError: a dtype is not supported in checkpoints.
    """
    for tensor in tensors:
        if tensor.dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"tensor {tensor.name}: dtype must be one of "
                f"{', '.join(STORED_DTYPES)}; got {tensor.dtype}"
            )
    shards = _split(tensors, max_file_bytes)
    if len(shards) == 1:
        _write_file(directory / SINGLE_FILE, tensors, source)
        return
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(directory / file, shard, source)
        places |= {tensor.name: file for tensor in shard}
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / INDEX_FILE).write_text(text, encoding="utf-8")


def _locate(directory: Path) -> dict[Path, set[str]]:
    """Returns the files to open, each with the tensors that the index names in it."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: set()}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(_nothing_found(directory))
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: weight_map must be a non-empty object")
    promised: dict[Path, set[str]] = {}
    for name, file in places.items():
        # Only plain names are allowed, because a downloaded checkpoint must not choose
        # which files of this machine are opened.
        plain = isinstance(file, str) and len(file) <= LONGEST_NAME
        if not plain or not re.fullmatch(PLAIN_FILE, file):
            raise CheckpointError(
                f"{index}: the file of tensor {name} must be a plain *.safetensors "
                f"name in the same directory; got {file!r:.200}"
            )
        if not (directory / file).is_file():
            raise CheckpointError(
                f"{directory / file}: missing, but {INDEX_FILE} names it; the download "
                f"is incomplete"
            )
        promised.setdefault(directory / file, set()).add(name)
    return promised


def _nothing_found(directory: Path) -> str:
    message = f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
    pickles = sorted(
        path.name
        for kind in ("*.bin", "*.pt", "*.pth")
        for path in directory.glob(kind)
    )
    if not pickles:
        return message
    return (
        f"{message}, only {', '.join(pickles[:3])}. Pickle files can run code and are "
        f"not read; where torch and transformers are installed, convert them: "
        f"AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY)"
    )


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        handle = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: truncated or damaged ({error}{_damage(path)}); fetch it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    with handle as opened:
        yield opened


def _tensors(path: Path, opened: Any) -> dict[str, Tensor]:
    start, header = _header(path)
    tensors = {}
    for name in opened.keys():  # noqa: SIM118 (not a mapping)
        view = opened.get_slice(name)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        fetch = view.__getitem__
        if dtype in RAW_DTYPES:
            offset = start + header[name]["data_offsets"][0]
            raw = functools.partial(np.memmap, path, RAW_DTYPES[dtype], "r", offset)
            fetch = functools.partial(_raw_region, raw, shape)
        tensors[name] = Tensor(path, shape, dtype, fetch)
    return tensors


def _raw_region(
    mapped: Callable[[tuple[int, ...]], np.ndarray],
    shape: tuple[int, ...],
    region: Index,
) -> np.ndarray:
    return np.array(mapped(shape)[region])


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Returns the byte offset of the tensor data and the header's entries by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, path.stat().st_size)))
    header.pop("__metadata__", None)
    return 8 + length, header


def _damage(path: Path) -> str:
    """Names the first tensor whose data is cut off, if the header is intact."""
    try:
        start, header = _header(path)
        ends = {name: start + t["data_offsets"][1] for name, t in header.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return ""  # The header itself is damaged, so the tensors are unknown.
    size = path.stat().st_size
    beyond = [name for name, end in ends.items() if end > size]
    if not beyond:
        return ""
    first = min(beyond, key=ends.__getitem__)
    return (
        f"; the data of tensor {first} ends at byte {ends[first]}, the file at {size}"
    )


def _check_promise(path: Path, promised: set[str], found: set[str]) -> None:
    missing = sorted(promised - found)
    if missing:
        raise CheckpointError(
            f"{path}: {INDEX_FILE} says that tensor {missing[0]} is in this file, but "
            f"it is not; index and files belong to different checkpoints"
        )


def _warn_of_copies(directory: Path, names: set[str]) -> None:
    if names:
        warnings.warn(
            f"{directory}: several files hold tensors of one name: "
            f"{', '.join(sorted(names)[:4])}; tensors of the file that {INDEX_FILE} "
            "names are used",
            CheckpointWarning,
            stacklevel=4,
        )


def _split(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if shards[-1] and tensor.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _write_file(
    path: Path, tensors: Sequence[StoredTensor], source: Callable[[str], np.ndarray]
) -> None:
    # transformers refuses a file whose metadata does not name a framework.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (offset, offset + tensor.num_bytes),
        }
        offset += tensor.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Aligns the start of the data.
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            values = np.ascontiguousarray(source(tensor.name))
            if (values.shape, values.dtype.name) != (tensor.shape, tensor.dtype):
                raise AssertionError(
                    f"{tensor.name}: {values.dtype.name}{values.shape} is not {tensor}"
                )
            file.write(values.reshape(-1).view(np.uint8).data)
            del values
