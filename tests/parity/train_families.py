"""Two GRPO steps of a tiny checkpoint, interrupted in the middle and resumed.

    python tests/parity/train_families.py FIXTURES TRAINED

writes the trained models with our logits of the fixtures' tokens (expected.npz), for
check_trained.py. tests/e2e/test_families.py does the same without transformers.
"""

import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from jaxrl_post import pretrained
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import forward, logits
from launch import grpo

# One of each family, and what could stand in the way of training: fused and quantised
# tensors, biases that only select. Not deepseek_v32_choosing: after training its
# indexers give some last choices the score 0 that other keys have too, and torch.topk
# takes any of them.
FAMILIES = (
    "llama_rope_llama3", "mistral_window", "mixtral", "qwen2_tied", "qwen2_moe",
    "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_nested",
    "phi3_partial_longrope_within", "olmo2", "olmo3_yarn_on_full_layers", "olmoe",
    "granite", "smollm3", "seed_oss", "glm4_moe", "deepseek_v2_lite", "deepseek_v3_fp8",
    "gpt_oss_mxfp4", "ministral", "ministral3", "iquestcoder", "cwm", "dots1",
    "solar_open", "glm4_moe_lite", "youtu", "minimax_m2_released",
    "glm_moe_dsa_shared", "glm_moe_dsa_choosing", "kimi_k2", "deepseek_v32",
    "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next_released",
    "nemotron_h", "nemotron_h_released", "gemma4_text_every_part",
    "gemma4_text_experts",
)  # fmt: skip


def character_tokenizer() -> Tokenizer:
    """A token a character, few enough for a vocabulary of 72."""
    names = ["<unk>", "<eos>", *"0123456789=>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {name: index for index, name in enumerate(names)}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<unk>", "<eos>"])
    return Tokenizer(backend, stop_ids=(1,), special_tokens={"eos_token": "<eos>"})


def train(fixture: Path, folder: Path, max_tokens: int = 3) -> Path:
    """Takes step 1, then resumes for step 2; returns the directory of the model."""
    source = folder / "source"
    shutil.copytree(fixture, source)
    character_tokenizer().save(source)
    command = [
        f"--run-dir={folder / 'run'}", f"--model={source}", "--env=arithmetic?level=0",
        "--dtype=float32", f"--rollout.max-tokens={max_tokens}",
        "--rollout.prompts-per-step=4", "--rollout.samples-per-prompt=4",
        "--rollout.reward-workers=1", "--eval.num-tasks=4", "--eval.every=0",
        "--checkpoint.every=1", "--optimizer.learning-rate=1e-3",
        "--optimizer.schedule=constant",
        # A gradient, although no answer is right.
        "--algorithm.entropy-coefficient=0.1",
    ]  # fmt: skip
    for steps in (1, 2):
        status = grpo.main([*command, f"--steps={steps}"])
        if status:
            raise RuntimeError(f"{fixture.name}: launch.grpo ended with {status}")
    return folder / "run" / "model"


def main(fixtures: Path, trained: Path) -> None:
    """Trains every family."""
    for name in FAMILIES:
        # Long enough that sparse attention chooses.
        most = 12 if name.endswith("choosing") else 3
        model = train(fixtures / name, trained / name, most)
        config, params = pretrained.load(model, dtype=jnp.float32)
        with np.load(fixtures / name / "expected.npz") as stored:
            tokens = stored["tokens"]
        hidden = forward(params, config, jnp.asarray(tokens))
        found = np.asarray(logits(params, config, hidden))
        np.savez(trained / name / "expected.npz", tokens=tokens, logits=found)
        jax.clear_caches()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: train_families.py FIXTURES TRAINED")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
