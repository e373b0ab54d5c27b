"""Writes adapters with PEFT, and looks with PEFT at adapters that save_ours.py wrote.

Needs torch, transformers, peft, numpy and safetensors, and nothing of this repository:

    python tests/parity/adapters/theirs.py write FIXTURES DIRECTORY [NAME ...]
    python tests/parity/adapters/theirs.py check FIXTURES SAVED

FIXTURES is what make_fixtures.py wrote. An adapter's directory is named after the
checkpoint that it changes and a word, as in "llama_mha-lora"; it has an expected.npz
with `tokens` and the float32 `logits` of the changed model: for a classifier of
sequences the logits of each row's last token.
"""
# pyright: reportMissingImports=false

import json
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import logging

TOLERANCE = 1e-4
ROWS, LENGTH = 2, 8

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
JOINED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# `out_proj` is of convolutions and of attention.
CONVOLVED = ["in_proj", "out_proj", "q_proj", "w1", "w2", "w3"]
DELTA = [
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj",
    "o_proj", "up_proj",
]  # fmt: skip
GROUPED = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]
LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DORA_RS = {"use_dora": True, "use_rslora": True}
DOWN = ["mlp.experts.down_proj"]
EXPERTS = [*DOWN, "mlp.experts.gate_up_proj"]

# By task of PEFT: transformers' class, and what makes it a reward model's.
CLASSES: dict[str, tuple[Any, dict[str, int]]] = {
    "CAUSAL_LM": (AutoModelForCausalLM, {}),
    "SEQ_CLS": (AutoModelForSequenceClassification, {"num_labels": 1}),
    # A model with its tower, whose task is CAUSAL_LM for PEFT.
    "WHOLE": (AutoModelForImageTextToText, {}),
    "TOKEN_CLS": (AutoModelForTokenClassification, {"num_labels": 2}),
}

# After the dash: options of LoraConfig in addition to rank 2.
CASES: dict[str, dict[str, Any]] = {
    "llama_mha-lora": {"target_modules": LINEAR, "lora_alpha": 6},
    "llama_mha-dora_rs": {"target_modules": LINEAR, "lora_alpha": 3, **DORA_RS},
    "llama_biases-all_linear_dora": {
        "target_modules": "all-linear",
        "use_dora": True,
        "lora_dropout": 0.1,
    },
    "llama_mha-reward": {
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "SEQ_CLS",
    },
    "phi3_window-reward": {"target_modules": JOINED, "task_type": "SEQ_CLS"},
    "qwen3-process": {
        "target_modules": LINEAR,
        "task_type": "TOKEN_CLS",
        "use_dora": True,
    },
    "llama_mha-head_and_table": {
        "target_modules": LINEAR,
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
    "qwen3-regex": {"target_modules": r".*\.self_attn\.(q|v)_proj"},
    "gemma2-gaussian": {"target_modules": LINEAR, "init_lora_weights": "gaussian"},
    "gemma3_nested-text": {"target_modules": r".*language_model.*\.(q|up)_proj"},
    "phi3_window-joined": {"target_modules": JOINED},
    "phi3_window-joined_dora_rs": {"target_modules": JOINED, **DORA_RS},
    "qwen2_moe-shared": {
        "target_modules": ["q_proj", "shared_expert.gate_proj", "mlp.gate_proj"]
    },
    "gpt_oss-attention_dora": {"target_modules": LINEAR[:4], "use_dora": True},
    "deepseek_v2_lite-dora": {"target_modules": ["q_proj", *LATENT], "use_dora": True},
    "deepseek_v3-rs": {
        "target_modules": ["q_a_proj", "q_b_proj", *LATENT],
        "use_rslora": True,
    },
    "qwen3_moe-experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "mixtral-experts_rs": {
        "target_modules": [],
        "target_parameters": EXPERTS,
        "use_rslora": True,
    },
    "qwen2_moe-experts_down": {
        "target_modules": ["o_proj"],
        "target_parameters": DOWN,
    },
    "olmoe-experts_ranks": {
        "target_modules": ["v_proj"],
        "target_parameters": EXPERTS,
        "rank_pattern": {r".*\.gate_up_proj": 4},
        "alpha_pattern": {"experts.gate_up_proj": 16, "experts.down_proj": 4},
    },
    "gpt_oss-experts": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
    "deepseek_v3-experts": {"target_modules": LATENT, "target_parameters": EXPERTS},
    "glm4_moe-experts": {"target_modules": [], "target_parameters": EXPERTS},
    "lfm2-joined": {"target_modules": CONVOLVED},
    "lfm2_biases_untied-dora": {"target_modules": CONVOLVED, "use_dora": True},
    "qwen3_5_text-delta": {"target_modules": DELTA},
    "qwen3_next_released-grouped_dora": {"target_modules": GROUPED, "use_dora": True},
    "gemma4_text-per_layer": {
        "target_modules": [*LINEAR, "per_layer_input_gate", "per_layer_projection"]
    },
    "gemma4_text_experts-experts": {
        "target_modules": ["q_proj", "mlp.gate_proj"],
        "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
    },
    "nemotron_h-mamba": {"target_modules": ["in_proj", "q_proj"]},
}


def write(fixtures: Path, directory: Path, names: list[str]) -> None:
    """Writes adapters with random numbers, in bfloat16."""
    for name in names or CASES:
        base = name.partition("-")[0]
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        options = {"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM", **CASES[name]}
        theirs = load(fixtures / base, options["task_type"])
        model = get_peft_model(theirs, LoraConfig(**options))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                noise = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
                if "magnitude" in key:
                    parameter *= 1 + 0.3 * torch.from_numpy(noise)
                else:
                    parameter.copy_(0.3 * torch.from_numpy(noise))
                # Rounded, so that the file says exactly what was computed with.
                parameter.copy_(parameter.bfloat16().float())
        tokens = np.load(fixtures / base / "expected.npz")["tokens"][:ROWS, :LENGTH]
        logits = score(model, tokens)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        # Not the path of this machine.
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(directory / name, save_embedding_layers=False)
        (directory / name / "README.md").unlink(missing_ok=True)
        np.savez(directory / name / "expected.npz", tokens=tokens, logits=logits)
        sys.stdout.write(f"{name}\n")


def check(fixtures: Path, saved: Path) -> None:
    """Loads our adapters over transformers' checkpoints and compares logits."""
    folders = sorted(path.parent for path in saved.glob("*/expected.npz"))
    assert folders, f"{saved}: no adapters"
    warnings.filterwarnings("error", message=".*adapter keys.*")
    largest = 0.0
    for folder in folders:
        options = json.loads((folder / "adapter_config.json").read_text())
        checkpoint, _, word = folder.name.partition("-")
        whole = word.startswith("whole")
        base = load(fixtures / checkpoint, "WHOLE" if whole else options["task_type"])
        model = PeftModel.from_pretrained(base, folder)
        stored = load_file(folder / "adapter_model.safetensors")
        found = get_peft_model_state_dict(model, save_embedding_layers=False)
        assert found.keys() == stored.keys(), f"{folder}: {found.keys() ^ stored}"
        for key, value in stored.items():
            assert torch.equal(found[key], value), f"{folder}: {key} changed"
        expected = np.load(folder / "expected.npz")
        gap = float(np.abs(score(model, expected["tokens"]) - expected["logits"]).max())
        assert gap < TOLERANCE, f"{folder}: logits differ by {gap}"
        largest = max(largest, gap)
    sys.stdout.write(
        f"peft: {len(folders)} adapters of ours load, largest difference of logits "
        f"{largest:.1e}\n"
    )


def load(folder: Path, task: str) -> Any:
    """Loads a checkpoint of transformers in float32, with the head of a task."""
    kind, labels = CLASSES[task]
    return kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **labels
    )


def score(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of a forward without dropout."""
    # Row by row: without a padding token a classifier takes one sequence at a time.
    with torch.no_grad():
        rows = [
            model.eval()(row[None]).logits for row in torch.from_numpy(tokens).long()
        ]
    return torch.cat(rows).numpy()


if __name__ == "__main__":
    logging.disable_progress_bar()
    # That the head of a classifier is new is no news.
    logging.set_verbosity_error()
    action, *rest = sys.argv[1:] or [""]
    if action == "write" and len(rest) >= 2:
        write(Path(rest[0]), Path(rest[1]), rest[2:])
    elif action == "check" and len(rest) == 2:
        check(Path(rest[0]), Path(rest[1]))
    else:
        sys.exit(__doc__)
