"""Directories of safetensors files: regions in, whole tensors out, one at a time.

Reading goes through the safetensors library, which maps the files and copies only the
regions that are asked for. Writing does not: its `save_file` wants every tensor of a
file in memory at once. The format is a length, a JSON header and the tensors back to
back (https://github.com/huggingface/safetensors#format), and the header follows from
shapes and dtypes, so it can be written before the first tensor is fetched.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl_post.models.errors import CheckpointError

__all__ = ["StoredTensor", "TensorFiles", "read_json", "write_tensors"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PLAIN_FILE = r"[^/\\\0]+\.safetensors"

# Names in the format, by name in NumPy.
STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class StoredTensor:
    """Name, shape and NumPy's name of the dtype of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * (4 if self.dtype == "float32" else 2)


class TensorFiles:
    """The tensors of a checkpoint directory, wherever they are; made by `open`."""

    def __init__(self, opened: Mapping[Path, Any]) -> None:
        self._place = {
            name: (path, handle)
            for path, handle in opened.items()
            for name in handle.keys()  # noqa: SIM118 (not a mapping)
        }

    @classmethod
    @contextmanager
    def open(cls, directory: Path) -> Iterator["TensorFiles"]:
        """Opens model.safetensors, or the shards that the index names.

        Raises:
            CheckpointError: there is neither; a shard is missing, damaged or lacks a
                tensor that the index promises; the index leaves the directory.
        """
        promised = _locate(directory)
        with ExitStack() as stack:
            opened = {
                path: stack.enter_context(_open(path)) for path in sorted(promised)
            }
            files = cls(opened)
            for path, names in promised.items():
                _check_promise(path, names, set(opened[path].keys()))
            yield files

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._place)

    def file(self, name: str) -> Path:
        """Returns the file that holds a tensor."""
        return self._place[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor; nothing is read but the header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Returns the dtype of a tensor by its name in the format, such as "BF16"."""
        return self._slice(name).get_dtype()

    def fetch(self, name: str, region: tuple[slice, ...]) -> np.ndarray:
        """Copies a region of a tensor into memory."""
        return self._slice(name)[region]

    def _slice(self, name: str) -> Any:
        return self._place[name][1].get_slice(name)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; got {content!r:.80}")
    return content


def write_tensors(
    directory: Path,
    tensors: Sequence[StoredTensor],
    source: Callable[[str], np.ndarray],
    max_file_bytes: int,
) -> None:
    """Writes tensors, one after the other, into as many files as the limit asks for.

    Args:
        directory: where; it exists and holds no model yet.
        tensors: in the order of writing.
        source: returns a whole tensor by its name; asked for each once, in that order.
        max_file_bytes: of tensor data in a file; a larger tensor gets its own file.

    Raises:
        CheckpointError: a dtype that checkpoints do not have.
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
    """Files to open, and the tensors that an index says are in each."""
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
        # A plain name, because a checkpoint from elsewhere must not choose which files
        # of this machine are opened.
        if not isinstance(file, str) or not re.fullmatch(PLAIN_FILE, file):
            raise CheckpointError(
                f"{index}: the file of tensor {name} must be a plain *.safetensors "
                f"name in the same directory; got {file!r}"
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
            f"{path}: truncated or damaged ({error}); fetch it again"
        ) from error
    with handle as opened:
        yield opened


def _check_promise(path: Path, promised: set[str], found: set[str]) -> None:
    missing = sorted(promised - found)
    if missing:
        raise CheckpointError(
            f"{path}: {INDEX_FILE} says that tensor {missing[0]} is in this file, but "
            f"it is not; index and files belong to different checkpoints"
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
    text += b" " * (-len(text) % 8)  # So that the data starts aligned.
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
        file.flush()
        os.fsync(file.fileno())
