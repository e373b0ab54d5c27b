"""A PEFT adapter and its base as one model directory, which `pretrained.load` merges.

The directory has links to the files of the base, to the adapter's own tokenizer files,
and, as `adapter`, to the adapter. So every reader of a model directory reads this one.
"""

import hashlib
import json
import os
import uuid
from pathlib import Path

from jaxrl_post.pretrained.directory import CONFIG_FILE
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.peft import files
from jaxrl_post.pretrained.tensor_files import read_json

__all__ = ["ADAPTER", "adapter_in", "base_of", "beside_base", "is_adapter"]

# The name of the adapter in the directory.
ADAPTER = "adapter"
# Files of an adapter's directory that replace the base's.
OWN = (
    "tokenizer*.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "chat_template.*", "vocab.json", "merges.txt",
    "additional_chat_templates", "generation_config.json",
)  # fmt: skip
# An adapter with this file has its own tokenizer; otherwise all files are the base's.
TOKENIZER = "tokenizer.json"


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, and no model.

    Raises:
        CheckpointError: it holds both.
    """
    if not (directory / files.CONFIG_FILE).is_file():
        return False
    weights = {path.name for path in directory.glob("*.safetensors")}
    weights |= {path.name for path in directory.glob("params")}
    if found := sorted(weights - {files.TENSOR_FILE}):
        raise CheckpointError(
            f"{directory}: both an adapter ({files.CONFIG_FILE}) and a model "
            f"({found[0]}); it is not clear which one is meant. Move the adapter's "
            "files to a directory of their own, or remove the other's files"
        )
    return True


def adapter_in(directory: Path) -> Path | None:
    """The adapter of a directory that `beside_base` made; None for any other."""
    adapter = directory / ADAPTER
    # A whole model may have an adapter next to its files, which does not count.
    is_ours = adapter.is_symlink() and (adapter / files.CONFIG_FILE).is_file()
    return adapter if is_ours else None


def base_of(adapter: Path) -> tuple[str, str | None]:
    """The name and the revision of an adapter's base, as its own file has them.

    Raises:
        CheckpointError: the file cannot be read, or names no base.
    """
    raw = read_json(adapter / files.CONFIG_FILE)
    name, revision = raw.get("base_model_name_or_path"), raw.get("revision")
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{adapter / files.CONFIG_FILE}: base_model_name_or_path must name the "
            f"model under the adapter; got {name!r}. --base names it otherwise"
        )
    return name, revision if isinstance(revision, str) and revision else None


def beside_base(adapter: Path, base: Path, folder: Path) -> Path:
    """Makes the directory of an adapter and its base, if it is not there yet.

    Args:
        adapter: directory of the adapter.
        base: directory of the model under it.
        folder: where to make it; its name follows from the files.

    Raises:
        CheckpointError: the base is no model, or an adapter itself.
    """
    if not (base / CONFIG_FILE).is_file() or is_adapter(base):
        raise CheckpointError(
            f"{base}: must be the model under the adapter {adapter}, with a "
            f"{CONFIG_FILE}; give the directory of a whole model"
        )
    links = {path.name: path for path in base.iterdir()}
    if (adapter / TOKENIZER).is_file():
        own = {path for pattern in OWN for path in adapter.glob(pattern)}
        generation = links.get("generation_config.json")
        links = {
            name: path
            for name, path in links.items()
            if not any(path.match(pattern) for pattern in OWN)
        }
        links |= {path.name: path for path in own}
        if generation is not None:
            links.setdefault(generation.name, generation)
    links[ADAPTER] = adapter
    places = {name: os.path.abspath(path) for name, path in sorted(links.items())}
    digest = hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]
    made = folder / f"{adapter.name}-{digest}"
    if made.is_dir():
        return made
    fresh = folder / f".{uuid.uuid4().hex}"
    fresh.mkdir(parents=True)
    for name, path in places.items():
        (fresh / name).symlink_to(path)
    try:
        fresh.rename(made)
    except OSError:  # another process was faster
        if not made.is_dir():
            raise
        for name in places:
            (fresh / name).unlink()
        fresh.rmdir()
    return made
