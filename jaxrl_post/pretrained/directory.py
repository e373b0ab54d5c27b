"""What every model directory has, whatever its weights lie in: config and tokenizer."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.params import DecoderParams, param_specs
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.pretrained.name_map import paths, some
from jaxrl_post.pretrained.tensor_files import read_json
from jaxrl_post.types import Array

__all__ = ["CONFIG_FILE", "SavesItself", "new_model_directory", "read_config_file"]

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class SavesItself(Protocol):
    """What saving a model needs of a tokenizer."""

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
) -> Iterator[tuple[Path, dict[str, Array]]]:
    """Makes a model directory, which appears complete, under its name, or not at all.

    Args:
        path: the directory to make; what stands there is never overwritten.
        config: of the model.
        params: of the model.
        tokenizer: written beside the model.
        source: a model directory whose special-token ids and generation_config.json
            are carried over. Without it config.json names no token that ends a text.

    Yields:
        (the directory under its temporary name, the parameters by path); the caller
        writes these into that one.

    Raises:
        CheckpointError: `path` is taken, the parameters are not those of `config`, or
            no checkpoint of the family can say what `config` says.
    """
    target = Path(path).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: already there; remove it or save elsewhere")
    raw = write_config(config)
    values = _match(config, params)
    dtype = params.embedding.dtype.name
    raw |= {"dtype": dtype, "torch_dtype": dtype, **_special_tokens(source, raw)}
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    staging.mkdir(parents=True)
    try:
        yield staging, values
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
        if source is not None and (Path(source) / GENERATION_FILE).is_file():
            shutil.copyfile(Path(source) / GENERATION_FILE, staging / GENERATION_FILE)
        if tokenizer is not None:
            tokenizer.save(staging)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_config_file(directory: Path) -> dict[str, Any]:
    """Reads the config.json of a model directory.

    Raises:
        CheckpointError: there is no such directory, or none in it that can be read.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(
            f"{directory}: no such directory; models are read from disk, so download "
            f"first: hf download NAME --local-dir DIRECTORY"
        )
    if not (directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{directory}: no {CONFIG_FILE}; this is not a checkpoint directory"
        )
    return read_json(directory / CONFIG_FILE)


def _special_tokens(
    source: str | os.PathLike[str] | None, written: Mapping[str, Any]
) -> dict[str, Any]:
    # Explicit nulls, but where the family has written an id because transformers takes
    # no null: the default ids there are those of Llama 2.
    raw = {} if source is None else read_config_file(Path(source))
    inner = raw.get("text_config") or {}
    found = {key: raw.get(key, inner.get(key)) for key in SPECIAL_TOKENS}
    return {
        key: written.get(key) if value is None else value
        for key, value in found.items()
    }


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
