"""Reads the sampling settings of a model's authors from generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxrl_post.data.tokenizer_files import TokenizerError, read_settings

__all__ = ["GenerationDefaults", "not_done", "read_generation_defaults"]

# Settings that are not taken over, with the values that have no effect in transformers.
NEUTRAL = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "min_length": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "guidance_scale": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "watermarking_config": None,
    "dola_layers": None,
    "token_healing": False,
    "max_time": None,
}


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling settings of a model; None for those that its file does not set.

    Attributes:
        temperature: > 0, or 0 for greedy decoding.
        top_k: number of tokens to keep, 0 for all.
        top_p: mass to keep, in (0, 1].
        min_p: minimum share of the top token's probability, in [0, 1].
        max_tokens: maximum number of tokens to sample.
        stop_strings: texts that end a completion.
        unsupported: settings that change sampling, but that are not taken over.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    unsupported: Mapping[str, Any] = field(default_factory=dict)


def not_done(unsupported: Mapping[str, Any]) -> str:
    """Warns of `GenerationDefaults.unsupported`; "" if there is nothing to warn of.

    >>> print(not_done({"repetition_penalty": 1.05})[:60])
    not done: generation_config.json asks for repetition_penalty
    >>> not_done({})
    ''
    """
    if not unsupported:
        return ""
    asked = ", ".join(f"{name} {value}" for name, value in unsupported.items())
    return (
        f"not done: generation_config.json asks for {asked}, which is not taken over "
        "from there"
    )


def read_generation_defaults(directory: str | Path) -> GenerationDefaults:
    """Reads generation_config.json; without the file, no setting is known.

    "do_sample": false means greedy decoding at any temperature; "do_sample": true
    without a temperature means temperature 1. Other missing settings stay None. This
    differs from transformers, which decodes greedily without "do_sample", and samples
    from the 50 most probable tokens without "top_k".

    Args:
        directory: the directory of a model.

    Raises:
        TokenizerError: the file is no object, or a setting is out of its range.

    >>> read_generation_defaults("no such directory").temperature is None
    True
    """
    file = Path(directory) / "generation_config.json"
    settings = read_settings(file)
    defaults = GenerationDefaults(
        temperature=_number(file, settings, "temperature", 0.0, float("inf")),
        top_k=_count(file, settings, "top_k", 0),
        top_p=_number(file, settings, "top_p", 0.0, 1.0),
        min_p=_number(file, settings, "min_p", 0.0, 1.0),
        max_tokens=_count(file, settings, "max_new_tokens", 1),
        stop_strings=_texts(file, settings, "stop_strings"),
        unsupported={
            name: settings[name]
            for name, neutral in NEUTRAL.items()
            if settings.get(name) not in (None, neutral, [])
        },
    )
    if defaults.top_p == 0:
        raise _refusal(file, "top_p", "a number in (0, 1]", 0)
    if settings.get("do_sample") is False:
        return replace(defaults, temperature=0.0, top_k=None, top_p=None, min_p=None)
    if settings.get("do_sample") is True and defaults.temperature is None:
        return replace(defaults, temperature=1.0)
    return defaults


def _number(
    file: Path, settings: Mapping[str, Any], name: str, low: float, high: float
) -> float | None:
    value = settings.get(name)
    if value is None:
        return None
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not low <= value <= high:
        raise _refusal(file, name, f"a number in [{low:g}, {high:g}]", value)
    return float(value)


def _texts(file: Path, settings: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = settings.get(name) or ()
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(
        isinstance(text, str) and text for text in texts
    ):
        raise _refusal(file, name, "a text or a list of texts, none empty", value)
    return tuple(texts)


def _count(
    file: Path, settings: Mapping[str, Any], name: str, least: int
) -> int | None:
    value = settings.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _refusal(file, name, f"an integer >= {least}", value)
    return value


def _refusal(file: Path, name: str, wanted: str, value: Any) -> TokenizerError:
    return TokenizerError(
        f"generation: {name} of {file} must be {wanted}; got {value!r}; correct the "
        "file"
    )
