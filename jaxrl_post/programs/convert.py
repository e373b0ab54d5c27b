"""Converts model directories, GGUF files and checkpoints of runs."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxrl_post import models, pretrained
from jaxrl_post.config.convert import ConvertConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.paths import (
    check_output,
    check_paths,
    check_repository,
    naming,
)
from jaxrl_post.config.run import RunConfig
from jaxrl_post.data.gguf_tokenizer import generation_settings, gguf_tokenizer
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.data.tokenizer_files import TokenizerError, write_stop_ids
from jaxrl_post.files import replace_file
from jaxrl_post.learner.adapters import lora_of
from jaxrl_post.learner.checkpoint import Checkpoints
from jaxrl_post.models import DecoderParams, ModelConfig
from jaxrl_post.models.adapters.lora import Adapter, LoRAConfig, adapter_specs, merged
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.pretrained.directory import SavesItself
from jaxrl_post.pretrained.families import read_config
from jaxrl_post.pretrained.gguf_files import read_gguf, write_gguf
from jaxrl_post.pretrained.orbax_files import CHUNK_BYTES
from jaxrl_post.pretrained.tensor_files import read_json
from jaxrl_post.programs.hub import Fetched, fetch
from jaxrl_post.programs.places import initial_of
from jaxrl_post.records.directory import RunDescription, RunDirectory, read_rows
from jaxrl_post.records.hub.card import CARD, converted_card, run_card
from jaxrl_post.records.hub.push import Push, check_push, push
from jaxrl_post.types import Array

__all__ = ["convert"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
# Folder of further chat templates, such as one for tool use.
TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer that is saved by copying its files.

    Attributes:
        directory: where they are.
        trained: whether the model was trained here, to end answers with the tokens of
            `Tokenizer.stop_ids`; generation_config.json then names them all.
    """

    directory: Path
    trained: bool = False

    def save(self, directory: Path) -> None:
        """Copies the tokenizer files that exist."""
        for name in TOKENIZER_FILES:
            if (self.directory / name).is_file():
                shutil.copyfile(self.directory / name, directory / name)
        templates = self.directory / TEMPLATES
        if templates.is_dir():
            shutil.copytree(templates, directory / TEMPLATES)
        if self.trained:
            write_stop_ids(directory, self.stop_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; none are known of a copy."""
        if not self.trained:
            return ()
        return Tokenizer.from_directory(self.directory).stop_ids


def convert(config: ConvertConfig, *, console: Console, command: str = "") -> None:
    """Writes a Hugging Face directory or an Orbax model directory, and uploads it.

    Args:
        config: the options.
        console: for messages to the user.
        command: not used.

    Raises:
        ConfigError: the output exists, or an option does not go with the input, or the
            tokenizer of a GGUF file is not supported.
        CheckpointError: the input cannot be read.
        PushError: the output is whole, but could not be uploaded.
    """
    del command
    _check_size(config)
    check_repository(config.push_to_hub, public=config.push_public)
    # Fail before anything is read; saving checks again before it writes.
    check_output(Path(config.output), "--output")
    check_paths(config)
    target = None
    if config.push_to_hub is not None:
        target = Push(config.push_to_hub, config.push_public)
        check_push(target, console)
    fetched = fetch(config, console=console)
    _write(fetched.config, console)
    output = Path(config.output)
    replace_file(output / CARD, _card(config, fetched))
    if target is not None:
        push(target, output, "Converted by launch.convert", console)


def _card(given: ConvertConfig, fetched: Fetched[ConvertConfig]) -> str:
    """The card of the output: of the run, or of the model that was converted."""
    place, title = Path(fetched.config.input), Path(given.output).absolute().name
    run = RunDirectory(place)
    saved = run.read_description() if (place / "checkpoints").is_dir() else None
    if saved is None:
        on_hub = "input" in fetched.names
        folder = place if place.is_dir() else place.parent
        return converted_card(given.input, folder=folder, title=title, on_hub=on_hub)
    rows = [*read_rows(run.metrics)] if run.metrics.exists() else []
    if given.step is not None:
        rows = [row for row in rows if row["step"] <= given.step]
    base = fetched.config.base or saved.config["model"]
    return run_card(saved, rows, title=title, bases=[Path(base), run.path / "model"])


def _write(config: ConvertConfig, console: Console) -> None:
    if Path(config.input).is_file():
        _from_gguf(config, console)
        return
    run = RunDirectory(Path(config.input))
    if (run.path / "checkpoints").is_dir():
        architecture, params, tokenizer, source = _from_run(run, config, console)
    else:
        architecture, params, tokenizer, source = _from_directory(config)
    with naming("--output"):
        pretrained.save(
            config.output,
            architecture,
            params,
            tokenizer=tokenizer,
            source=source,
            max_file_bytes=int(config.max_shard_gb * 1e9),
            weights_format=config.format,
        )
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    _tell(console, config, count, params.embedding.dtype)


def _tell(console: Console, config: ConvertConfig, count: int, dtype: object) -> None:
    line = f"{config.output}: {count:,} parameters in {dtype}"
    console.print(line, markup=False, highlight=False)


def _from_gguf(config: ConvertConfig, console: Console) -> None:
    """Writes the model of a GGUF file, whose tensors are never in memory together."""
    _check_no_run(config, "is a file")
    if config.format != "huggingface":
        raise ConfigError(
            f"--format: a GGUF file becomes a Hugging Face directory first; leave "
            f"--format {config.format} to a second conversion, of that directory"
        )
    file = read_gguf(config.input)
    try:
        tokenizer = gguf_tokenizer(file.metadata)
    except TokenizerError as error:
        raise ConfigError(f"--input: {config.input}: {error}") from error
    with naming("--output"):
        count, dtype = write_gguf(
            config.output,
            file,
            tokenizer=tokenizer,
            generation=generation_settings(file.metadata),
            dtype=config.dtype,
            max_file_bytes=int(config.max_shard_gb * 1e9),
        )
    _tell(console, config, count, dtype)


def _check_size(config: ConvertConfig) -> None:
    limit, given = config.max_shard_gb, f"{config.max_shard_gb:g}"
    if not 0 < limit < math.inf:
        raise ConfigError(f"--max-shard-gb: must be finite and > 0; got {given}")
    if config.format == "orbax" and limit * 1e9 < CHUNK_BYTES:
        raise ConfigError(
            f"--max-shard-gb: must be at least {CHUNK_BYTES / 1e9:g} with --format "
            f"orbax, which reads and writes that much at a time; got {given}"
        )


type Parts = tuple[ModelConfig, DecoderParams[Array], SavesItself, Path | None]


def _check_no_run(config: ConvertConfig, reason: str) -> None:
    for name in ("step", "base"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"--{name}: is for runs, and {config.input} {reason}; drop the option"
            )


def _from_directory(config: ConvertConfig) -> Parts:
    _check_no_run(config, "has no checkpoints folder")
    source = Path(config.input)
    dtype = None if config.dtype is None else jnp.dtype(config.dtype)
    architecture, params = pretrained.load(source, dtype=dtype)
    return architecture, params, TokenizerFiles(source), source


def _from_run(run: RunDirectory, config: ConvertConfig, console: Console) -> Parts:
    saved = run.read_description()
    if saved is None:
        raise ConfigError(f"--input: {run.path} has checkpoints but no config.json")
    folder = _origin(run, saved, config.base, console)
    vision = saved.config.get("vision", "off")
    raw = read_json(folder / "config.json")
    architecture = replace(read_config(raw, vision=vision != "off"), head=saved.head)
    checkpoints = Checkpoints(run.path / "checkpoints")
    try:
        step = checkpoints.latest() if config.step is None else config.step
        if step is None or step not in checkpoints.steps():
            known = ", ".join(map(str, checkpoints.steps())) or "none"
            raise ConfigError(f"--step: {run.path} has checkpoints of {known}")
        checkpoints.verify(step)
        dtype = None if config.dtype is None else jnp.dtype(config.dtype)
        options = dict(saved.config.get("lora", {}))
        options["targets"] = tuple(options.get("targets", ()))
        lora = lora_of(AdapterConfig(**options), architecture)
        if lora is not None:
            specs = adapter_specs(architecture, lora)
            adapter = checkpoints.restore_params(step, specs)
            params = _merged(folder, saved, architecture, lora, adapter, dtype)
        else:
            specs = models.param_specs(architecture)
            if vision == "frozen":
                specs = replace(specs, vision=None)
            params = checkpoints.restore_params(step, specs, dtype=dtype)
            if vision == "frozen":
                dtype = params.embedding.dtype
                _, whole = pretrained.load(folder, dtype=dtype, vision=True)
                params = params.replace(vision=whole.vision)
    finally:
        checkpoints.close()
    return architecture, params, TokenizerFiles(folder, trained=True), folder


def _merged(
    folder: Path,
    saved: RunDescription,
    architecture: ModelConfig,
    lora: LoRAConfig,
    adapter: Adapter[Array],
    dtype: jnp.dtype | None,
) -> DecoderParams[Array]:
    """Base and adapter of a LoRA run, merged; dtype None keeps the base's dtype."""
    kind, trained = saved.config["lora"]["quantize"], saved.config.get("dtype")
    # The base is the run's, in its dtype; sums are rounded once.
    wanted = None if trained is None else jnp.dtype(trained)
    _, base = pretrained.load(
        folder,
        dtype=wanted,
        head=architecture.head,
        vision=architecture.vision is not None,
    )
    if kind is not None:
        base = quantize(base, kind, donate=True)
    elif dtype is not None:
        base = jax.tree.map(lambda leaf: leaf.astype(_wider(leaf.dtype, dtype)), base)
    params = merged(base, adapter, architecture, lora)
    if dtype is None:
        return params
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _wider(one: jnp.dtype, other: jnp.dtype) -> jnp.dtype:
    """The dtype with more bits; `one` if both have as many."""
    return other if jnp.finfo(other).bits > jnp.finfo(one).bits else one


def _origin(
    run: RunDirectory, saved: RunDescription, base: str | None, console: Console
) -> Path:
    """The folder with config.json and tokenizer of a run; checkpoints lack both."""
    model, revision = saved.config["model"], saved.config.get("revision")
    if base is not None:
        folder = Path(base)
    elif model.partition("@")[0] in {name.partition("@")[0] for name in saved.hub}:
        began = RunConfig(model=model, revision=revision)
        fetched = fetch(began, console=console, pinned=saved.hub)
        folder = Path(fetched.config.model)
    else:
        folder = initial_of(model, run, saved) or Path(model)
    if (folder / "config.json").is_file():
        return folder
    raise ConfigError(
        f"--base: there is no config.json in {folder}, the model from which the run "
        "started; give the directory where it is now"
    )
