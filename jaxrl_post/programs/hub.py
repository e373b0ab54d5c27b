"""Downloads models and data files from the Hugging Face hub before a run.

A model is ORG/NAME or ORG/NAME@REVISION, a file of a data set
hf://datasets/ORG/NAME/FILE or hf://datasets/ORG/NAME@REVISION/FILE. `fetch` downloads
them and replaces the names by local paths, before anything is read or compiled. It also
returns the commit of each name, so that a resumed run uses the same commits. An adapter
of PEFT is put next to its base, local or downloaded. Address, cache
and token are huggingface_hub's (HF_ENDPOINT, HF_HOME, `hf auth login`).
"""

import contextlib
import dataclasses
import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import replaced
from jaxrl_post.config.paths import CONTINUED, FILES, MAIN_MODELS, MODELS
from jaxrl_post.config.run import RunConfig
from jaxrl_post.extras import install
from jaxrl_post.learner.adapters import continued
from jaxrl_post.learner.model import is_stored
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.peft.beside import base_of, beside_base, is_adapter
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.hub.card import CARD
from jaxrl_post.records.path import run_path

__all__ = ["Fetched", "fetch", "fetch_run"]


PART = r"[A-Za-z0-9][\w.-]*"
# Revisions of pull requests and of converted files contain slashes.
REVISION = r"refs/(?:convert|pr)/[^/@]+|[^/@]+"
MODEL = re.compile(rf"({PART}/{PART})(?:@({REVISION}))?")
FILE = re.compile(rf"hf://datasets/({PART}/{PART})(?:@({REVISION}))?/(.+)")

# Files that are downloaded: not the same weights in other formats.
WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
LEFT_OUT = ("*/*.safetensors", "*/*.json", "consolidated*.safetensors")
CONFIG_ALONE = ("config.json", "adapter_config.json")


class Source(NamedTuple):
    """A model repository, or a file of a data set, on the hub."""

    kind: str  # "model" or "dataset"
    repository: str
    revision: str | None
    file: str | None = None

    @property
    def key(self) -> str:
        """The key of its commit in `Fetched.commits`."""
        prefix = "" if self.kind == "model" else "datasets/"
        suffix = "" if self.revision is None else f"@{self.revision}"
        return f"{prefix}{self.repository}{suffix}"

    @property
    def command(self) -> str:
        """The shell command that downloads the source."""
        parts = ["hf", "download", self.repository]
        parts += [] if self.file is None else [self.file, "--repo-type", self.kind]
        parts += [] if self.revision is None else ["--revision", self.revision]
        return " ".join(parts)


@dataclass(frozen=True)
class Fetched[Config]:
    """A configuration with local paths instead of the hub's names.

    Attributes:
        config: with the paths.
        commits: commit of each name, such as {"Qwen/Qwen2.5-0.5B": "060db64..."}.
        names: the options that were replaced, by dotted field, as the user gave them.
    """

    config: Config
    commits: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)

    def named[Other](self, config: Other) -> Other:
        """Replaces the local paths in a configuration by their names on the hub."""
        for path, name in self.names.items():
            config = replaced(config, path, name)
        return config


def fetch[Config](
    config: Config,
    *,
    console: Console,
    pinned: Mapping[str, str] = {},
    weights: bool = True,
) -> Fetched[Config]:
    """Downloads the models and files of a configuration to huggingface_hub's cache.

    Directories, files and presets are left as they are.

    Args:
        config: of a program; its `revision`, if it has one, is its model's.
        console: for a line per download.
        pinned: commits to use, by name, from the run that is resumed.
        weights: False downloads only a model's config.json.

    Raises:
        ConfigError: huggingface_hub is not installed, the hub cannot be reached and
            the cache lacks the files, or there is no such repository, revision or file.
    """
    revision = getattr(config, "revision", None)
    commits: dict[str, str] = {}
    names: dict[str, str] = {}
    local = config

    def take(path: str) -> None:
        nonlocal local
        name = _value(local, path)
        given = revision if path in MAIN_MODELS else None
        source = None if name is None else _source(path, name, given)
        if name is None or source is None:
            return
        known = {**pinned, **commits}.get(source.key)
        folder = _snapshot(source, _option(path), known, weights=weights)
        commits[source.key] = folder.name
        names[path] = name
        found = folder if source.file is None else folder / source.file
        local = replaced(local, path, str(found))
        line = f"{name}: commit {folder.name[:12]} in {folder.parents[1]}"
        console.print(line, markup=False, highlight=False)

    take(CONTINUED)
    adapter = _value(local, CONTINUED)
    if adapter is not None:
        if not isinstance(config, RunConfig):
            raise ConfigError(
                f"{_option(CONTINUED)}: is for a run, which begins with the adapter's "
                "values; give --lora.rank"
            )
        model, base = _under(config, Path(adapter))
        for name, value in (("model", model), ("base", base)):
            config = replaced(config, name, value)
            local = replaced(local, name, value)
    for path in (*MODELS, *FILES):
        if path != CONTINUED:
            take(path)
    if revision is not None and not names.keys() & set(MAIN_MODELS):
        raise ConfigError(
            "--revision: is of a model on the hub, named as ORG/NAME; drop the option"
        )
    found = Fetched(local, commits, names)
    return _with_bases(found, config, {**pinned, **commits}, console, weights)


def _under(config: RunConfig, adapter: Path) -> tuple[str, str | None]:
    """Returns `model` and `base` of a run that continues an adapter.

    A preset has random weights, under which no adapter was trained.

    Args:
        config: with the model's name as the user gave it, or as it is by default.
        adapter: its directory.

    Raises:
        ConfigError: there is no adapter, or no model under it.
    """
    model, base, option = config.model, config.base, _option(CONTINUED)
    try:
        if not is_adapter(adapter):
            raise ConfigError(
                f"{option}: {adapter} is no directory with an adapter_config.json, and "
                "no name on the hub; a whole model is given as --model"
            )
        if is_stored(model) or model not in PRESETS:
            return model, base
        if base is not None:
            return base, None
        if model != RunConfig.model:
            raise ConfigError(
                f"--model: {model} is a preset with random weights, under which "
                f"{adapter} was not trained; give the model under it, or none for the "
                "one that the adapter names"
            )
        named, revision = base_of(adapter)
    except CheckpointError as error:
        raise ConfigError(f"{option}: {error}, and so does --model") from error
    on_hub = revision is not None and not Path(named).exists()
    return (f"{named}@{revision}" if on_hub else named), None


def _with_bases[Config](
    found: Fetched[Config],
    given: Config,
    pinned: Mapping[str, str],
    console: Console,
    weights: bool,
) -> Fetched[Config]:
    """Puts each adapter next to its base, which is downloaded where it is on the hub.

    Args:
        found: with local paths of what the options name.
        given: the configuration as the user gave it.
        pinned: as `fetch`.
        console: as `fetch`.
        weights: as `fetch`.

    Raises:
        ConfigError: an adapter's base cannot be had, or `base` is given without one.
    """
    local, base = found.config, _value(found.config, "base")
    commits, names = dict(found.commits), dict(found.names)
    folder = Path.home() / ".cache/jaxrl_post/adapters"
    for path in MODELS:
        adapter, option = _value(local, path), _option(path)
        if adapter is None or path in ("base", CONTINUED):
            continue
        try:
            if not is_adapter(Path(adapter)):
                continue
            named, revision = (
                (base, None)
                if base is not None and path in MAIN_MODELS
                else base_of(Path(adapter))
            )
            under = Path(named)
            if not under.is_dir():
                source = _source(path, named, revision)
                if source is None:
                    raise ConfigError(
                        f"{option}: {adapter} is an adapter of {named!r}, which is "
                        "neither a directory here nor a name on the hub; give the "
                        "model under it with --base, or write where it is into "
                        "base_model_name_or_path of its adapter_config.json"
                    )
                under = _snapshot(
                    source, option, pinned.get(source.key), weights=weights
                )
                commits[source.key] = under.name
            made = beside_base(Path(adapter), under, folder)
        except CheckpointError as error:
            raise ConfigError(f"{option}: {error}") from error
        names.setdefault(path, _value(given, path))
        local = replaced(local, path, str(made))
        if path in MAIN_MODELS and base is not None:
            names.setdefault("base", _value(given, "base"))
            local, base = replaced(local, "base", None), None
        line = f"{names[path]}: an adapter, merged into {named}"
        console.print(line, markup=False, highlight=False)
    # A run may have one, and `convert` has its own check.
    model = _value(given, "model")
    is_run = model is None or (Path(model) / "checkpoints").is_dir()
    if base is not None and not is_run:
        raise ConfigError(
            f"--base: is the model under an adapter, and {model} is "
            "none; drop the option"
        )
    return Fetched(local, commits, names)


def fetch_run[Config: RunConfig](
    config: Config, *, console: Console
) -> Fetched[Config]:
    """Fetches for a training run; a resumed run gets the commits with which it began.

    Args:
        config: as the user gave it.
        console: for a line per download.

    Raises:
        ConfigError: as `fetch`; or the options contradict the adapter that the run
            continues.
        ValueError: the run's config.json is damaged.
    """
    path = run_path(config)
    saved = RunDirectory(path).read_description() if config.resume else None
    pinned = {} if saved is None else saved.hub
    found = fetch(config, console=console, pinned=pinned)
    lora = continued(found.config.lora, found.config.model)
    # A default run_dir is named after the model on the hub, not after its path.
    local = dataclasses.replace(found.config, run_dir=str(path), lora=lora)
    names = {**found.names, "run_dir": config.run_dir}
    return Fetched(local, found.commits, names)


def _source(path: str, name: str, revision: str | None) -> Source | None:
    """The source that an option names on the hub; None for a local value."""
    if path in FILES:
        if not name.startswith("hf://"):
            return None
        found = FILE.fullmatch(name)
        if found is None or ".." in found[3].split("/"):
            raise ConfigError(
                f"{_option(path)}: must be hf://datasets/ORG/NAME/FILE, or "
                f"hf://datasets/ORG/NAME@REVISION/FILE; got {name!r}"
            )
        return Source("dataset", *found.groups())
    found = MODEL.fullmatch(name)
    if found is None or Path(name).exists():
        return None
    if revision is not None and found[2] is not None:
        raise ConfigError(
            f"--revision: {name} has a revision of its own; give one of the two"
        )
    return Source("model", found[1], found[2] or revision)


def _snapshot(
    source: Source, option: str, commit: str | None, *, weights: bool
) -> Path:
    """Downloads the needed files; returns the commit's folder in the cache."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{option}: there is no {source.repository} on this machine, and to fetch "
            f"it from the hub huggingface_hub is needed; {install('hub')}, "
            f"or run `{source.command} --local-dir DIRECTORY` elsewhere and give the "
            "directory"
        ) from error
    allowed: Sequence[str] = WANTED if weights else CONFIG_ALONE
    if source.file is not None:
        allowed = (glob.escape(source.file),)

    try:
        folder = huggingface_hub.snapshot_download(
            source.repository,
            repo_type=source.kind,
            revision=commit or source.revision,
            allow_patterns=list(allowed),
            ignore_patterns=list(LEFT_OUT) if source.file is None else None,
        )
    # The client raises errors of its own, of its HTTP library, and of the system.
    except Exception as error:
        raise ConfigError(f"{option}: {_failure(source, error)}") from error
    found = _checked(source, Path(folder), option, weights=weights)
    if weights and source.kind == "model":
        # The card says what the license is. A run does without it, and so does a cache
        # of an earlier version, which has none.
        with contextlib.suppress(Exception):
            huggingface_hub.hf_hub_download(
                source.repository, CARD, revision=found.name
            )
    return found


def _checked(source: Source, folder: Path, option: str, *, weights: bool) -> Path:
    """Returns the folder if it has the expected files."""
    if source.file is not None and not (folder / source.file).is_file():
        raise ConfigError(
            f"{option}: the data set {source.repository} has no file {source.file!r} "
            f"at {source.revision or 'main'}; correct the name"
        )
    adapter = (folder / "adapter_config.json").is_file()
    if source.file is None and not adapter and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{option}: {source.repository} has no config.json; it is not a model of "
            "transformers"
        )
    if source.file is None and weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{option}: {source.repository} has no weights in safetensors, and no "
            "others are read; save it again with transformers' save_pretrained"
        )
    return folder


def _failure(source: Source, error: Exception) -> str:
    """The message for a failed download, with a remedy."""
    from huggingface_hub import errors

    what = "model" if source.kind == "model" else "data set"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"the {what} {source.repository} is gated; accept its terms on its page, "
            "then log in with `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        where = "" if source.kind == "dataset" else "neither a directory nor a preset, "
        return (
            f"{source.repository} is {where}no {what} on the hub that can be read; "
            "correct the name, or log in with `hf auth login` if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the {what} {source.repository} has no revision {source.revision!r}"
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"there is no {source.repository} on this machine, and the hub cannot be asked "
        f"for it: {reason[0]}. With a connection, `{source.command}` downloads it"
    )


def _option(path: str) -> str:
    return "--" + path.replace("_", "-")


def _value(config: Any, path: str) -> str | None:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config
