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

from jaxrl_post.models import forward, load_pretrained, logits
from jaxrl_post.models.lora import (
    LoRAConfig,
    LoRAParams,
    adaptable,
    adapted,
    initialize_adapter,
)
from jaxrl_post.models.peft_files import save_adapter

CHECKPOINTS = (
    "deepseek_v2_lite",
    "deepseek_v3",
    "gemma2",
    "gpt_oss",
    "granite_biases",
    "llama_biases",
    "llama_mha",
    "olmo2",
    "phi3_window",
    "qwen2_moe",
    "qwen3",
)
# Under transformers 5, PEFT 0.21 takes MLPs in these families for their experts.
EXPERTS_ALONE = ("deepseek_v2_lite", "deepseek_v3")
MLP = ("gate", "up", "down")
KINDS = {
    "lora": LoRAConfig(rank=3, alpha=6.0),
    "dora_rs": LoRAConfig(rank=3, alpha=2.5, rank_stabilized=True, dora=True),
}


def main(fixtures: Path, saved: Path) -> None:
    """Writes SAVED/CHECKPOINT-KIND, with every matrix adapted that PEFT can adapt."""
    for checkpoint in CHECKPOINTS:
        folder = fixtures / checkpoint
        config, params = load_pretrained(folder, dtype=jnp.float32)
        tokens = np.load(folder / "expected.npz")["tokens"]
        left_out = MLP if checkpoint in EXPERTS_ALONE else ()
        targets = tuple(name for name in adaptable(config) if name not in left_out)
        for name, kind in KINDS.items():
            lora = dataclasses.replace(kind, targets=targets)
            rng = np.random.default_rng(zlib.crc32(f"{checkpoint} {name}".encode()))
            start = initialize_adapter(jax.random.key(0), params, config, lora)
            adapter = {path: noisy(own, rng) for path, own in start.items()}
            policy = adapted(params, adapter, config, lora)
            found = logits(policy, config, forward(policy, config, jnp.asarray(tokens)))
            target = saved / f"{checkpoint}-{name}"
            save_adapter(target, config, adapter, lora, base_model=checkpoint)
            np.savez(target / "expected.npz", tokens=tokens, logits=found)


def noisy(own: LoRAParams, rng: np.random.Generator) -> LoRAParams:
    """Random A, B and, where there is one, m."""

    def draw(array: jax.Array) -> jax.Array:
        return jnp.asarray(0.15 * rng.standard_normal(array.shape), array.dtype)

    scaled = own.magnitude
    if scaled is not None:
        scaled = scaled * (1 + draw(scaled))
    return LoRAParams(down=draw(own.down), up=draw(own.up), magnitude=scaled)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
