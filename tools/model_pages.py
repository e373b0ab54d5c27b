"""A page for each family of models, and a table of all, from the code and its tests.

What a family has is read from the checkpoints with which it is tested, and when it was
compared with transformers from `tests/parity/compared.json`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_post.models import GatedDelta, Mamba2, ModelConfig, ShortConvolution
from jaxrl_post.models.adapters.lora import adaptable
from jaxrl_post.models.exact import check_exact
from jaxrl_post.models.recurrences import LinearAttention
from jaxrl_post.pretrained.families import FAMILIES, family_of, read_config
from jaxrl_post.pretrained.peft.bases import module_names
from jaxrl_post.pretrained.presets import PRESETS

__all__ = ["page", "support"]

CASES = Path(__file__).parents[1] / "tests/parity"
PAGES = "models"
HEADING = (
    "`model_type`", "attention", "experts", "states", "`cp`", "guesses", "`--exact`",
    "adapters", "reward models", "compared",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A checkpoint that is compared with transformers.

    Attributes:
        name: of the case.
        raw: its config.json.
        config: as it is read.
        compared: date, version of transformers, and the largest gap of logits; of a
            model that sees, also the gap of rows with pictures.
    """

    name: str
    raw: dict[str, Any]
    config: ModelConfig
    compared: dict[str, Any]


@cache
def cases() -> dict[str, list[Case]]:
    """The cases of each family, by their model_type."""
    compared = json.loads((CASES / "compared.json").read_text(encoding="utf-8"))
    found: dict[str, list[Case]] = {name: [] for name in FAMILIES}
    for file in sorted(CASES.glob("fixtures/*/config.json")):
        raw, name = json.loads(file.read_text(encoding="utf-8")), file.parent.name
        if name not in compared:
            raise ValueError(
                f"tests/parity/compared.json: no entry for the fixture {name}; run "
                f"python -m tests.parity.compare {name}"
            )
        case = Case(name, raw, read_config(raw), compared[name])
        found[raw["model_type"]].append(case)
    return found


def support() -> str:
    """The table of all families."""
    lines = [f"| {' | '.join(HEADING)} |", f"|{'---|' * len(HEADING)}"]
    lines += [f"| {' | '.join(_row(name))} |" for name in sorted(FAMILIES)]
    return "\n".join(lines)


def page(name: str) -> str:
    """The page of a family."""
    family, found = FAMILIES[name], cases()[name]
    config = found[0].config
    inner = family_of(config.model_type)
    lines = [f"# {name}", ""]
    if family.text_model is not None:
        lines += [
            f"The text model of `{name}` is read, and saved as `{config.model_type}`, "
            f"class `{inner.architecture}ForCausalLM`.",
            "",
        ]
    else:
        lines += [f"`{family.architecture}ForCausalLM` of transformers.", ""]
    lines += ["## What it has", "", *(f"- {each}" for each in _parts(found)), ""]
    sizes = [n for n, preset in PRESETS.items() if preset.model_type == name]
    if sizes:
        shown = ", ".join(f"`{size}`" for size in sizes)
        lines += ["## Sizes", "", f"Presets, for `launch.plan` and tests: {shown}.", ""]
    lines += ["## What goes with it", "", *(f"- {each}" for each in _with(found)), ""]
    lines += [
        "## Compared with transformers",
        "",
        "Logits, greedy continuations, packed rows and the cache, in float32, of "
        "models with random weights. The gap is the largest of any logit.",
        "",
        "| case | transformers | date | gap | with pictures |",
        "|---|---|---|---|---|",
    ]
    for case in found:
        told = case.compared
        pictures = f"{told['pictures']:.1e}" if "pictures" in told else "-"
        lines.append(
            f"| `{case.name}` | {told['transformers']} | {told['date']} | "
            f"{told['gap']:.1e} | {pictures} |"
        )
    return "\n".join(lines) + "\n"


def _row(name: str) -> Iterator[str]:
    found = cases()[name]
    config = found[0].config
    latest = max(found, key=lambda case: case.compared["date"]).compared
    yield f"[`{name}`]({PAGES}/{name}.md)"
    yield "latent" if config.latent is not None else "grouped"
    yield _yes(any(case.config.experts is not None for case in found))
    yield _states(config)
    short = "" if config.indexer is None else " up to `index_topk` tokens"
    yield _yes(not config.has_states) + short
    yield "without `--exact`" if config.has_states else "yes"
    yield ("yes" if _exact(config, 2) is None else "without `tp`") + short
    yield "LoRA, DoRA"
    yield _yes(family_of(config.model_type).classifier is not None)
    yield f"{latest['date']}, {latest['transformers']}"


def _parts(found: list[Case]) -> Iterator[str]:
    configs = [case.config for case in found]
    config = configs[0]
    if config.latent is not None:
        yield "Multi-head latent attention; the cache holds latents."
    else:
        yield "Grouped-query attention."
    if any(layer.window for each in configs for layer in each.layers):
        yield "Sliding windows in some or all layers."
    if any(each.sinks for each in configs):
        yield "An extra logit for each head in the softmax."
    if config.attention_gate:
        yield "A sigmoid gate on the output of attention."
    if any(each.qk_norm for each in configs):
        yield "Norms of queries and keys."
    kinds = {each.rope_scaling.kind for each in configs if each.rope_scaling}
    if kinds:
        yield f"Rotary scaling, compared: {', '.join(sorted(kinds))}."
    experts = next((each.experts for each in configs if each.experts), None)
    if experts is not None:
        shared = ", and a shared MLP for every token" if experts.shared_size else ""
        yield f"A mixture of experts with {experts.scoring} scores{shared}."
    if config.has_states:
        yield (
            f"Layers with a state: {_states(config)} "
            "([how](../../explanation/sampling.md#the-cache))."
        )
    if config.indexer is not None:
        yield (
            "Sparse attention: an indexer chooses the `index_topk` keys that a query "
            "sees ([how](../../explanation/model.md#keys-that-are-chosen))."
        )


def _with(found: list[Case]) -> Iterator[str]:
    config = found[0].config
    family = family_of(config.model_type)
    axes = ["dp", "fsdp", "tp"]
    axes += ["ep"] if any(case.config.experts for case in found) else []
    axes += [] if config.has_states else ["cp"]
    yield f"`--mesh`: {', '.join(f'`{axis}`' for axis in axes)}."
    if isinstance(config.recurrence, LinearAttention):
        yield "`tp` must divide the key heads of layers with a state."
    refusal = _exact(config, 2)
    yield f"`--exact`{'' if refusal is None else f', but: {refusal}'}."
    names = ", ".join(f"`{each}`" for each in module_names(config))
    own = ", ".join(f"`{each}`" for each in adaptable(config))
    yield f"`--lora.targets`: {own}; by PEFT's names {names}."
    if isinstance(config.recurrence, Mamba2):
        yield "Not under PEFT: adapters of `mamba_output` (`out_proj`)."
    if config.indexer is not None:
        yield "Sequences of more than `index_topk` tokens: not with `cp` or `--exact`."
    if config.has_states:
        yield (
            "Not: `cp`, JetStream, `--rollout.guesses` with `--exact`, and as the "
            "model of `--rollout.draft`."
        )
    if family.classifier is None:
        yield "Not: reward models that are saved; transformers has no class for them."
    elif not family.judges_tokens:
        yield "Not: process reward models that are saved; transformers has no class."
    formats = [case for case in found if "quantization_config" in case.raw]
    kinds = {case.raw["quantization_config"]["quant_method"] for case in formats}
    if kinds:
        yield f"Read from weights in {', '.join(sorted(kinds))}, too."


def _states(config: ModelConfig) -> str:
    kinds = {
        ShortConvolution: "short convolutions",
        GatedDelta: "gated delta nets",
        Mamba2: "Mamba-2",
    }
    return kinds.get(type(config.recurrence), "")


def _exact(config: ModelConfig, parts: int) -> str | None:
    """The reason against exact mode if `parts` devices split the heads, or None."""
    try:
        check_exact(config.within(1), parts)
    except ValueError as error:
        return str(error)
    return None


def _yes(flag: bool) -> str:
    return "yes" if flag else ""
