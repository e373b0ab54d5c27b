"""Writes random adapters with our code, for `theirs.py check` to look at.

python tests/parity/adapters/save_ours.py FIXTURES SAVED
"""

import dataclasses
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post import pretrained
from jaxrl_post.models import DecoderParams, Head, ModelConfig, forward, logits, values
from jaxrl_post.models.adapters.lora import (
    LoRAConfig,
    LoRAParams,
    adaptable,
    adapted,
    initialize_adapter,
)
from jaxrl_post.models.adapters.whole import Whole
from jaxrl_post.pretrained.peft.files import save_adapter

CHECKPOINTS = (
    "cwm",
    "deepseek_v2_lite",
    "deepseek_v3",
    "dots1",
    "gemma2",
    "gemma4_text",
    "gemma4_text_every_part",
    "gemma4_text_experts",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granite_biases",
    "lfm2",
    "lfm2_moe",
    "llama_biases",
    "llama_mha",
    "ministral3",
    "mixtral",
    "nemotron_h",
    "nemotron_h_released",
    "olmo2",
    "olmoe",
    "phi3_window",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next_released",
    "solar_open",
    "youtu",
)
# Under transformers 5, PEFT 0.21 takes MLPs in these families for their experts.
EXPERTS_ALONE = (
    "deepseek_v2_lite",
    "deepseek_v3",
    "dots1",
    "glm4_moe",
    "glm4_moe_lite",
    "nemotron_h",
    "nemotron_h_released",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next_released",
    "solar_open",
)
# Whole models with their towers.
WHOLE = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
MLP = ("gate", "up", "down")
# PEFT refuses `out_proj` in models of Mamba.
REFUSED = ("mamba_output",)
# These have adapters of reward models too: heads are trained in full.
HEADS: dict[Head, tuple[str, ...]] = {
    "value": ("value_head",),
    "process": ("process_head",),
}
CLASSIFIERS = ("llama_mha", "phi3_window", "qwen3")
KINDS = {
    "lora": LoRAConfig(rank=3, alpha=6.0),
    "dora_rs": LoRAConfig(rank=3, alpha=2.5, rank_stabilized=True, dora=True),
}


def main(fixtures: Path, saved: Path) -> None:
    """Writes SAVED/CHECKPOINT-KIND, with every matrix adapted that PEFT can adapt."""
    for checkpoint in (*CHECKPOINTS, *WHOLE):
        config, _ = pretrained.load(fixtures / checkpoint)
        left_out = MLP if checkpoint in EXPERTS_ALONE else ()
        for name, kind in KINDS.items():
            possible = adaptable(config, dora=kind.dora)
            targets = tuple(
                name for name in possible if name not in (*left_out, *REFUSED)
            )
            lora = dataclasses.replace(kind, targets=targets)
            word = f"whole_{name}" if checkpoint in WHOLE else name
            write(fixtures / checkpoint, saved / f"{checkpoint}-{word}", lora, "lm")
    for checkpoint in CLASSIFIERS:
        for head, whole in HEADS.items():
            lora = dataclasses.replace(KINDS["lora"], whole=whole)
            write(fixtures / checkpoint, saved / f"{checkpoint}-{head}", lora, head)


def write(base: Path, target: Path, lora: LoRAConfig, head: Head) -> None:
    """Writes one random adapter, and what the model with it says."""
    vision = base.name in WHOLE
    config, params = pretrained.load(base, dtype=jnp.float32, head=head, vision=vision)
    tokens = np.load(base / "expected.npz")["tokens"]
    rng = np.random.default_rng(zlib.crc32(target.name.encode()))
    start = initialize_adapter(jax.random.key(0), params, config, lora)
    adapter = {path: noisy(own, rng) for path, own in start.items()}
    policy = adapted(params, adapter, config, lora)
    found = output(policy, config, tokens)
    save_adapter(target, config, adapter, lora, base_model=base.name)
    np.savez(target / "expected.npz", tokens=tokens, logits=found)


def output(
    params: DecoderParams[jax.Array], config: ModelConfig, tokens: np.ndarray
) -> jax.Array:
    """The logits of transformers' model with that head."""
    hidden = forward(params, config, jnp.asarray(tokens))
    if config.head == "value":
        return values(params, hidden)[:, -1:]
    if config.head == "process":
        assert params.process_head is not None
        weight, bias = params.process_head.weight, params.process_head.bias
        return hidden @ weight.T + bias
    return logits(params, config, hidden)


def noisy(
    own: LoRAParams | Whole, rng: np.random.Generator
) -> LoRAParams[jax.Array] | Whole[jax.Array]:
    """Random A, B and, where there is one, m, or a random parameter."""

    def draw(array: jax.Array) -> jax.Array:
        return jnp.asarray(0.15 * rng.standard_normal(array.shape), array.dtype)

    if isinstance(own, Whole):
        return Whole(draw(own.weight))
    scaled = own.magnitude
    if scaled is not None:
        scaled = scaled * (1 + draw(scaled))
    return LoRAParams(down=draw(own.down), up=draw(own.up), magnitude=scaled)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
