"""Named architectures without weights: published models and small models of our own.

Every `--model` option accepts these names for a randomly initialised model, with a
tokenizer trained on the environment's texts; `launch.plan` compiles without weights.

`presets.json` holds a config.json for each name, with the keys that its family reads.
Published models keep the keys and values of their own config.json, so that they can be
compared with the source. `initialize` draws matrices and embeddings from a normal
distribution with standard deviation `initializer_range`, and sets norms to one and
biases to zero. It is 0.02, except for "demo", whose width of 128 is far below those for
which 0.02 was chosen (docs/decisions/0029).
Where releases of one size differ, the Qwen2.5 presets are the base models (some
instruct models have another context length and epsilon) and the Qwen3 presets the first
post-trained models (later ones have another context length and rotary base). "demo",
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
    """Reads the config of a preset at its first use."""

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
    return read_config(_configs()[name], vision=True)


PRESETS: Mapping[str, ModelConfig] = _Presets()
