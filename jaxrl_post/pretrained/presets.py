"""Architectures by name, without weights: small ones of our own, and published models.

Every `--model` takes these names, for a randomly initialised model with a tokenizer
learned from the environment's texts; `launch.plan` compiles them without weights.

`presets.json` has a config.json for each, of what its family reads. The numbers of
published models are those of their own config.json, under the names that they have
there, so that each can be compared with its source. All of them publish an
`initializer_range` of 0.02, which is `ParamSpec`'s scale: `initialize` draws matrices
and embeddings from a normal distribution of that width, and starts norms at one and
biases at zero. Where releases of one size differ, Qwen2.5's are its base models (some
instruct ones have another context length and epsilon) and Qwen3's its first
post-trained ones (later ones have another context length and rotary base). "demo",
"tiny" and "small" are for machines without an accelerator and for benchmarks.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.families import read_config

__all__ = ["PRESETS"]


class _Presets(Mapping[str, ModelConfig]):
    """Reads what a name stands for when it is asked for."""

    def __getitem__(self, name: str) -> ModelConfig:
        return _read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_configs())

    def __len__(self) -> int:
        return len(_configs())


@cache
def _configs() -> dict[str, dict[str, Any]]:
    file = files("jaxrl_post.pretrained") / "presets.json"
    return json.loads(file.read_text(encoding="utf-8"))


@cache
def _read(name: str) -> ModelConfig:
    return read_config(_configs()[name])


PRESETS: Mapping[str, ModelConfig] = _Presets()
