"""Writes tiny random checkpoints, and the logits that transformers computes from them.

Needs torch, transformers, numpy and safetensors, and nothing of this repository:

    python tests/parity/make_fixtures.py DIRECTORY

Every weight is random, norms and biases included, and large enough that attention is
far from uniform: with the usual initialisation a wrong rotation would hardly show.
"""
# pyright: reportMissingImports=false

import json
import shutil
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

SMALL = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        model_type: the family.
        config: what differs from `SMALL`.
        rope: `rope_parameters`; None for the family's default.
        old_keys: rewrite config.json as transformers 4 wrote it.
        dtype: on disk; the expected logits are computed in float32 either way.
        max_shard_size: as transformers' save_pretrained has it.
        length: tokens in each of the two rows.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    old_keys: bool = False
    dtype: str = "bfloat16"
    max_shard_size: str = "1GB"
    length: int = 20


def rope(kind: str, theta: float = 500.0, **entries: Any) -> dict[str, Any]:
    """Returns a rope_parameters dictionary."""
    return {"rope_type": kind, "rope_theta": theta, **entries}


TWO_WIDE_HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}

CASES = {
    "llama_mha": Case("llama", {"num_key_value_heads": 4}),
    "llama_biases": Case(
        "llama", {"attention_bias": True, "mlp_bias": True}, old_keys=True
    ),
    "llama_tied_mqa_wide_heads": Case(
        "llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 12}
    ),
    "llama_shards": Case("llama", max_shard_size="20KB"),
    "llama_rope_linear": Case(
        "llama", rope=rope("linear", factor=4.0), old_keys=True
    ),
    "llama_rope_llama3": Case(
        "llama",
        TWO_WIDE_HEADS,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=32),
        old_keys=True,
    ),
    "llama_rope_dynamic_within": Case("llama", rope=rope("dynamic", factor=2.0)),
    "llama_rope_dynamic_beyond": Case(
        "llama",
        {"max_position_embeddings": 16},
        rope("dynamic", factor=2.0),
        old_keys=True,
    ),
    "llama_rope_yarn": Case(
        "llama",
        TWO_WIDE_HEADS,
        rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "llama_rope_yarn_options": Case(
        "llama",
        TWO_WIDE_HEADS,
        rope("yarn", factor=2.0, original_max_position_embeddings=32,
             attention_factor=1.5, beta_fast=3.0, beta_slow=0.5, truncate=False),
        old_keys=True,
    ),
    "qwen2_tied": Case("qwen2", {"tie_word_embeddings": True}, dtype="float32"),
    "qwen2_sliding_from_layer_1": Case(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        rope("default", theta=1e6),
        old_keys=True,
    ),
    "qwen3": Case(
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "num_attention_heads": 3,
         "num_key_value_heads": 3},
    ),
    "qwen3_sliding_layer_0": Case(
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_rope_yarn": Case(
        "qwen3",
        {**TWO_WIDE_HEADS, "tie_word_embeddings": True},
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.8,
             mscale_all_dim=0.3),
    ),
}  # fmt: skip


def main(directory: Path) -> None:
    """Writes every case into a directory of its own, replacing what was there."""
    logging.disable_progress_bar()
    for name, case in CASES.items():
        folder = directory / name
        shutil.rmtree(folder, ignore_errors=True)
        write_checkpoint(folder, case, np.random.default_rng(zlib.crc32(name.encode())))
        write_expected(folder, case, np.random.default_rng(zlib.crc32(b"tokens")))
        size = sum(path.stat().st_size for path in folder.iterdir())
        sys.stdout.write(f"{name}: {size / 1024:.0f} KiB\n")


def write_checkpoint(folder: Path, case: Case, rng: np.random.Generator) -> None:
    """Writes config.json and the weights."""
    entries = {**SMALL, **case.config}
    if case.rope is not None:
        entries["rope_parameters"] = case.rope
    config = AutoConfig.for_model(case.model_type, **entries)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = draw(name, tuple(parameter.shape), rng)
            parameter.copy_(torch.from_numpy(values))
    model.to(getattr(torch, case.dtype)).save_pretrained(
        folder, max_shard_size=case.max_shard_size
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    if case.old_keys:
        raw = as_transformers_4(raw)
    path.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws the values of one parameter."""
    if name.endswith("norm.weight"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    scale = 1.0 if "embed" in name else 0.5
    if len(shape) == 2 and "embed" not in name:
        scale = 1.5 / shape[1] ** 0.5
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def as_transformers_4(raw: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a config.json in the keys of transformers 4, by hand."""
    raw = dict(raw)
    parameters = dict(raw.pop("rope_parameters"))
    raw["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    # The oldest files say "type", as those with linear scaling did.
    key = "type" if kind == "linear" else "rope_type"
    raw["rope_scaling"] = None if kind == "default" else {key: kind, **parameters}
    raw["torch_dtype"] = raw.pop("dtype")
    raw["transformers_version"] = "4.44.0"
    raw.pop("layer_types", None)
    return raw


def write_expected(folder: Path, case: Case, rng: np.random.Generator) -> None:
    """Writes tokens and the float32 logits of what lies on disk."""
    tokens = rng.integers(0, SMALL["vocab_size"], (2, case.length), dtype=np.int32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
    assert logits.dtype == np.float32
    np.savez(folder / "expected.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_fixtures.py DIRECTORY")
    main(Path(sys.argv[1]))
