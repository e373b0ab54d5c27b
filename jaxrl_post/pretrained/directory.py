"""Config and tokenizer of a model directory, in every format of weights."""

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from jaxrl_post.files import make_folder, move, settle, writing
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.params import DecoderParams, param_specs
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.pretrained.name_map import paths, some
from jaxrl_post.pretrained.tensor_files import read_json
from jaxrl_post.types import Array

__all__ = [
    "CONFIG_FILE",
    "SavesItself",
    "new_model_directory",
    "read_config_file",
    "remove",
    "staged",
]

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
REMOVE_SECONDS = 10.0
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class SavesItself(Protocol):
    """A tokenizer that can be saved with a model."""

    def save(self, directory: Path) -> Any:
        """Writes the tokenizer's files into a directory."""
        ...


@contextmanager
def new_model_directory(
    path: str | os.PathLike[str],
    config: ModelConfig,
    params: DecoderParams[Array],
    tokenizer: SavesItself | None,
    source: str | os.PathLike[str] | None,
) -> Iterator[tuple[Path | None, dict[str, Array]]]:
    """Makes a model directory atomically, as `staged` does.

    Args:
        path: the directory to make; existing files are never overwritten.
        config: the model's config.
        params: the model's parameters.
        tokenizer: saved with the model.
        source: a model directory whose special-token ids and generation_config.json
            are copied. Without `source`, config.json has no end-of-text token.

    Yields:
        (what `staged` yields, the parameters by path); the caller writes the
        parameters into the directory.

    Raises:
        CheckpointError: `path` is not empty, the parameters do not fit `config`, or
            the family's checkpoint format cannot express `config`.
    """
    raw = write_config(config)
    values = _match(config, params)
    dtype = params.embedding.dtype.name
    raw |= {"dtype": dtype, "torch_dtype": dtype, **_special_tokens(source, raw)}
    if config.head == "value":
        raw["pad_token_id"] = _pad(raw, tokenizer)
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    with staged(path) as staging:
        yield staging, values
        if staging is None:
            return
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
        if source is not None and (Path(source) / GENERATION_FILE).is_file():
            shutil.copyfile(Path(source) / GENERATION_FILE, staging / GENERATION_FILE)
        if tokenizer is not None:
            tokenizer.save(staging)


@contextmanager
def staged(path: str | os.PathLike[str]) -> Iterator[Path | None]:
    """Makes a directory atomically: `path` is complete, on the disk, or not there.

    Args:
        path: the directory to make; existing files are never overwritten.

    Yields:
        A temporary directory, which is renamed to `path` at the end. In a program of
        several processes process 0 writes, and the others get None.

    Raises:
        CheckpointError: `path` is not empty.
        WriteError: the disk is full or fails; nothing is left behind.
    """
    if jax.process_index():
        yield None
        return
    target = Path(path).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: already there; remove it or save elsewhere")
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    with writing(target, "nothing of it was left behind"):
        try:
            make_folder(staging)
            yield staging
            settle(staging)
            move(staging, target)
        finally:
            remove(staging)


def remove(folder: Path) -> None:
    """Removes a directory in which threads of a writer that failed may still write."""
    end = time.monotonic() + REMOVE_SECONDS
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.05)


def read_config_file(directory: Path) -> dict[str, Any]:
    """Reads the config.json of a model directory.

    Raises:
        CheckpointError: the directory or a readable config.json in it is missing.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(
            f"{directory}: no such directory; models are read from disk, so download "
            f"first: hf download NAME --local-dir DIRECTORY"
        )
    if (directory / "adapter_config.json").is_file() and not (
        directory / CONFIG_FILE
    ).is_file():
        raise CheckpointError(
            f"{directory}: an adapter of PEFT and no model; load its base, and the "
            "adapter over it (pretrained.load_adapter), or merge the two: python -m "
            "launch.convert"
        )
    if not (directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{directory}: no {CONFIG_FILE}; this is not a checkpoint directory"
        )
    return read_json(directory / CONFIG_FILE)


def _special_tokens(
    source: str | os.PathLike[str] | None, written: Mapping[str, Any]
) -> dict[str, Any]:
    # Without a key transformers takes Llama 2's id, so nulls are written explicitly,
    # except where the family has written an id because transformers refuses null.
    raw = {} if source is None else read_config_file(Path(source))
    inner = raw.get("text_config") or {}
    found = {key: raw.get(key, inner.get(key)) for key in SPECIAL_TOKENS}
    return {
        key: written.get(key) if value is None else value
        for key, value in found.items()
    }


def _pad(raw: Mapping[str, Any], tokenizer: SavesItself | None) -> int | None:
    """The padding of a model that is read at a sequence's last token.

    transformers reads it at the last token that is no padding. That is one too early
    where answers end with the token that pads; without padding it refuses batches.
    """
    pad, end = raw["pad_token_id"], raw["eos_token_id"]
    ends = {*(end if isinstance(end, list) else [end])}
    ends |= {*getattr(tokenizer, "stop_ids", ())}
    if pad is not None and pad in ends:
        _log.warning(
            "%s: pad_token_id %d is null here: answers end with this token, and "
            "transformers would read the value of the token before it. For batches "
            "there, give tokenizer and model a pad token of their own",
            CONFIG_FILE,
            pad,
        )
        return None
    return pad


def _match(config: ModelConfig, params: DecoderParams[Array]) -> dict[str, Array]:
    """Returns the parameters by path after a check against the config."""
    found, expected = paths(params), paths(param_specs(config))
    if found.keys() != expected.keys():
        raise CheckpointError(
            "params: do not match the config; missing: "
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
    return found
