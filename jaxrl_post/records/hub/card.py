"""Writes the README.md of a saved model: its card, as the Hugging Face hub shows it."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from jaxrl_post.config.offline import PreferenceConfig, RewardConfig, SFTConfig
from jaxrl_post.config.paths import FILES, MODELS, REPOSITORY
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import flattened
from jaxrl_post.pretrained.peft.beside import adapter_in
from jaxrl_post.records import notation
from jaxrl_post.records.directory import RunDescription, RunDirectory, read_rows
from jaxrl_post.records.fingerprints import Fingerprint
from jaxrl_post.records.hub.public import Public, is_of_the_machine
from jaxrl_post.records.metric_table import ACCURACY, MISMATCH, REWARD
from jaxrl_post.records.visible import visible
from jaxrl_post.sharding import processes

__all__ = ["CARD", "Part", "converted_card", "front_matter", "run_card", "run_cards"]

CARD = "README.md"

# The directories that a run saves.
type Part = Literal[
    "model", "adapter", "critic", "critic_adapter", "prm", "prm_adapter"
]
PARTS: tuple[Part, ...] = get_args(Part.__value__)
# Models that were trained next to the policy.
COMPANIONS = {
    "critic": "critic of a run of {}: its value model, which predicts the reward of an "
    "unfinished answer",
    "prm": "implicit reward model of a run of {}: a language model whose log-ratio to "
    "the run's reference is the reward of a token",
}

# Keys of a card's metadata that say how the base, and what is made of it, may be used.
LICENSE = ("license", "license_name", "license_link")
TASKS = {
    "lm": "text-generation",
    "value": "text-classification",
    "process": "token-classification",
}
# Curves whose first and last values a card has, by their titles.
CURVES = {
    REWARD: "Reward in training",
    ACCURACY: "Held-out accuracy",
    "eval/reward": "Held-out reward",
    "train/loss": "Training loss",
    "eval/loss": "Held-out loss",
    MISMATCH: "Mismatch of sampler and trainer (1 is none)",
}
PROGRAMS = (RLConfig, SFTConfig, PreferenceConfig, RewardConfig)

# A card is a page: more than this is something else.
MOST_BYTES = 2**20


def front_matter(folder: Path) -> dict[str, Any]:
    """Returns the metadata of a model's card; empty if it has none that can be read."""
    try:
        with (folder / CARD).open("rb") as file:
            text = file.read(MOST_BYTES).decode("utf-8", "replace")
        found = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
        values = yaml.safe_load(found[1]) if found else None
    # A card is written by hand, and no run depends on it.
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def run_cards(directory: RunDirectory, model: str, note: str = "") -> dict[str, str]:
    """Writes the cards of all directories that a run may save, in process 0.

    Args:
        directory: of the run.
        model: local directory of the model with which it began.
        note: a sentence about the saved model.

    Returns:
        Texts by the directory's part; none in the other processes.
    """
    description = None if processes.index() else directory.read_description()
    if description is None:
        return {}
    adapter = adapter_in(Path(model))
    bases = [Path(model)] if adapter is None else [adapter, Path(model)]
    rows = [*read_rows(directory.metrics)] if directory.metrics.exists() else []
    title = directory.path.absolute().name
    return {
        part: run_card(
            description, rows, title=title, bases=bases, part=part, note=note
        )
        for part in PARTS
    }


def run_card(
    description: RunDescription,
    rows: Sequence[Mapping[str, Any]],
    *,
    title: str,
    bases: Sequence[Path] = (),
    part: Part = "model",
    note: str = "",
) -> str:
    """Writes the card of a directory that a run saves.

    Args:
        description: of the run.
        rows: of its metrics, as metrics.jsonl has them, up to the saved step.
        title: of the page.
        bases: local directories of the model with which the run began; the first that
            has a card says what its license is.
        part: the directory.
        note: a sentence about the saved model; not for one next to the policy.

    Returns:
        Markdown, with metadata in YAML before it.
    """
    known = Public(description)
    base = next((found for each in bases if (found := front_matter(each))), {})
    origin = known.model(description.config.get("model", description.model))
    ancestor = origin or _repository(base.get("base_model"))
    named = known.base() if origin is None and ancestor is None else None
    method = _method(description.config)
    is_adapter = part.endswith("adapter")
    metadata = {
        "base_model": ancestor or named,
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": TASKS.get(description.head),
        "datasets": known.datasets(description.config),
        "tags": ["jaxrl_post", *dict.fromkeys([method, *_tags(description, part)])],
        **{key: base[key] for key in LICENSE if _text(base.get(key))},
    }
    companion = part.removesuffix("_adapter")
    if companion in COMPANIONS:
        if companion == "critic":
            del metadata["pipeline_tag"]
        told = COMPANIONS[companion].format(f"`{_program(description)}`")
        body = [
            f"The {'adapter of the ' if is_adapter else ''}{told}. The card of the "
            "trained model says how the run went."
        ]
    else:
        body = _told_run(description, rows, known, part)
        body[0] += f" {note}" if note else ""
    return _page(metadata, title, body)


def converted_card(source: str, *, folder: Path, title: str, on_hub: bool) -> str:
    """Writes the card of a model that was converted from another directory.

    Args:
        source: its name, or its path.
        folder: the local directory; its own card's metadata are kept.
        title: of the page.
        on_hub: whether `source` is a name on the hub.
    """
    metadata = {**front_matter(folder), "library_name": "transformers"}
    told = source if on_hub else Path(source).name
    if on_hub:
        metadata["base_model"] = source.partition("@")[0]
    metadata["tags"] = list(
        dict.fromkeys(["jaxrl_post", *_texts(metadata.get("tags", []))])
    )
    return _page(
        metadata, title, [f"Converted from {_code(told)} by `launch.convert`."]
    )


def _page(metadata: Mapping[str, Any], title: str, body: Sequence[str]) -> str:
    kept = {key: value for key, value in metadata.items() if value}
    head = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    return "\n\n".join([f"---\n{head}---", f"# {_cell(title)}", *body]) + "\n"


def _told_run(
    description: RunDescription,
    rows: Sequence[Mapping[str, Any]],
    known: Public,
    part: Part,
) -> list[str]:
    """The sections of a trained model's card."""
    model = str(description.config.get("model", description.model))
    origin = known.told(model, is_path=True)
    last = rows[-1]["step"] if rows else 0
    what = "An adapter of PEFT on" if part == "adapter" else "Made from"
    body = [
        f"{what} {_code(origin)} by `{_program(description)}` of jaxrl_post, with "
        f"{description.num_parameters:,} parameters, in {last} steps."
    ]
    if curves := [*_curves(rows)]:
        body += ["## Results", _table(("", "first", "last"), curves)]
    if inputs := [*_inputs(description, known)]:
        told = "Checksums are CRC-32; of a large file of weights they cover a sample."
        headings = ("option", "what", "fingerprint")
        body += ["## Data and models", told, _table(headings, inputs)]
    settings = [*_settings(description, known)]
    body += ["## Command", _block(known.command(description.command))]
    if settings:
        body += ["## Settings that differ from the defaults"]
        body += [_table(("option", "value"), settings)]
    versions = ", ".join(f"{name} {of}" for name, of in description.versions.items())
    return [*body, "## Versions", _cell(f"{versions}; mesh {description.mesh}")]


def _curves(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The first and the last finite values of the curves; an accuracy's interval."""
    for metric, title in CURVES.items():
        ends = [row for row in rows if _finite(row["metrics"].get(metric))]
        if ends:
            yield title, _value(metric, ends[0]), _value(metric, ends[-1])


def _value(metric: str, row: Mapping[str, Any]) -> str:
    metrics = row["metrics"]
    form = {ACCURACY: notation.percent, MISMATCH: notation.ratio}.get(
        metric, notation.number
    )
    told = form(metrics[metric])
    low, high = (metrics.get(f"{metric}_{end}") for end in ("low", "high"))
    if _finite(low) and _finite(high):
        told += f" (95 % interval {form(low)} to {form(high)})"
    return f"{told} at step {row['step']}"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _inputs(description: RunDescription, known: Public) -> Iterator[tuple[str, ...]]:
    """The files, models and tasks that the run read, with their fingerprints."""
    flat = flattened(description.config)
    for name, found in (description.inputs or {}).items():
        value = flat.get(name)
        told = _code(known.told(str(value), is_path=True)) if value else ""
        yield _option(name), told, _fingerprint(found)


def _fingerprint(found: Fingerprint) -> str:
    """One line of a fingerprint, of the weights and of the files of data."""
    pieces = []
    for name, facts in found.items():
        if len(found) > 2 and not name.endswith((".safetensors", "config.json")):
            continue
        told = ", ".join(
            f"{fact} {value:08x}"
            if fact == "crc32"
            else f"{value:,} {'texts' if fact == 'count' else fact}"
            for fact, value in facts.items()
        )
        pieces.append(f"{name.removeprefix('the number of ')}: {told}")
    return "; ".join(pieces)


def _settings(description: RunDescription, known: Public) -> Iterator[tuple[str, ...]]:
    """The options that differ from the defaults of the program's configuration."""
    given = flattened(description.config)
    defaults = max(
        (flattened(dataclasses.asdict(each())) for each in PROGRAMS),
        key=lambda values: (
            len(values.keys() & given.keys()) - len(values.keys() ^ given.keys())
        ),
    )
    for name, value in given.items():
        if value == defaults.get(name) or is_of_the_machine(name):
            continue
        is_path = name in (*MODELS, *FILES)
        told = [known.told(each, is_path=is_path) for each in _strings(value)]
        shown = json.dumps(value, ensure_ascii=False)
        if told:
            shown = " ".join(json.dumps(each, ensure_ascii=False) for each in told)
        yield _code(_option(name)), _code(shown)


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(each) for each in values] if isinstance(value, str | list) else []


def _option(name: str) -> str:
    is_option = name not in ("tasks", "initial")
    return "--" + name.replace("_", "-") if is_option else f"{name} of the run"


def _program(description: RunDescription) -> str:
    found = re.search(r"-m (launch\.\w+)", description.command)
    return found[1] if found else "jaxrl_post"


def _method(config: Mapping[str, Any]) -> str:
    """The algorithm or the loss, without the module of one from elsewhere."""
    section = config.get("algorithm") or config.get("loss") or {}
    name = section.get("name") or ("reward-model" if "centering" in config else "sft")
    return name.partition("?")[0].rpartition(":")[2]


def _tags(description: RunDescription, part: Part) -> list[str]:
    tags = ["reinforcement-learning"] if "rollout" in description.config else []
    tags += ["process-reward-model"] if description.head == "process" else []
    tags += ["lora"] if part.endswith("adapter") else []
    tags += ["process-reward-model"] if part.startswith("prm") else []
    return tags + (["critic"] if part.startswith("critic") else [])


def _repository(value: Any) -> str | None:
    """The name of a card's base model; None if it has none, or several."""
    named = value[0] if isinstance(value, list) and len(value) == 1 else value
    is_name = isinstance(named, str) and REPOSITORY.fullmatch(named)
    return str(named) if is_name else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> list[str]:
    return [each for each in (value if isinstance(value, list) else [value]) if each]


def _code(text: str) -> str:
    return f"`{text.replace('`', "'")}`"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|").replace("\n", " ")


def _block(text: str) -> str:
    """An indented block, which no character of the text can end."""
    return "\n".join(f"    {line}" for line in visible(text).split("\n"))
