"""Writes tiny random checkpoints, and what transformers computes from them.

Needs torch, transformers, numpy and safetensors, and nothing of this repository:

    python tests/parity/make_fixtures.py DIRECTORY [NAME ...]

Every weight is random, norms and biases included, and large enough that attention is
far from uniform: with the usual initialisation a wrong rotation would hardly show.

Each checkpoint has an expected.npz: `tokens`, the float32 `logits` of a forward over
them, and `greedy`, what follows the first `PROMPT` tokens of each row when always the
likeliest token is taken.
"""
# pyright: reportMissingImports=false

import json
import shutil
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CASES, SMALL, Case
from quantize import decode_fp8, decode_mxfp4, encode_fp8, encode_mxfp4
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

PROMPT = 8
CONTINUATION = 8
# Between the two likeliest tokens at every step: far above what frameworks differ by.
GREEDY_GAP = 1e-3
# 128 in DeepSeek-V3. Not all sizes here are multiples: there are partial blocks.
FP8_BLOCK = 16

# Families whose older configurations name the kind of scaling "type".
TYPE_KEY = ("deepseek_v2", "deepseek_v3", "phi3", "qwen2_5_vl_text", "youtu")
# Families that had `layer_types` in transformers 4 already.
EARLY_LAYER_TYPES = ("cwm", "gpt_oss", "olmo3", "smollm3")

QUANTIZATION_CONFIGS = {
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    },
    "mxfp4": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
}

TINY_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}
TINY_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": SMALL["hidden_size"],
    "patch_size": 4,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 4,
}
TINY_QWEN3_5_VISION = {
    key: value
    for key, value in TINY_QWEN_VISION.items()
    if key not in ("fullatt_block_indexes", "deepstack_visual_indexes")
}
IMAGE_IDS = {
    "image_token_id": 71,
    "video_token_id": 70,
    "vision_start_token_id": 69,
    "vision_end_token_id": 68,
}
# For a vision-language model: its text model's type, where a case does not say, and the
# rest.
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {
            "vision_config": {"model_type": "siglip_vision_model", **TINY_VISION},
            "mm_tokens_per_image": 1,
            "boi_token_index": 69,
            "eoi_token_index": 70,
            "image_token_index": 71,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
            "audio_config": None,
        },
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        {
            "vision_config": {
                "patch_size": 4,
                "mm_embed_dim": SMALL["hidden_size"],
                "mm_posemb_size": 16,
                "output_proj_dims": SMALL["hidden_size"],
            },
            "audio_config": None,
        },
    ),
    "kimi_k25": (
        "deepseek_v3",
        {
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "patch_size": 4,
                "pos_emb_height": 2,
                "pos_emb_width": 2,
                "pos_emb_time": 1,
            },
            "projection_hidden_size": 16,
            # The ids of images lie outside of 72 tokens: theirs have no embedding.
        },
    ),
    "mistral3": (
        "mistral",
        {
            "vision_config": {"model_type": "pixtral", "head_dim": 8, **TINY_VISION},
            "image_token_index": 71,
        },
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        {"vision_config": TINY_QWEN_VISION, **IMAGE_IDS},
    ),
    "qwen3_vl": ("qwen3_vl_text", {"vision_config": TINY_QWEN_VISION, **IMAGE_IDS}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {"vision_config": TINY_QWEN_VISION, **IMAGE_IDS},
    ),
    "qwen3_5": ("qwen3_5_text", {"vision_config": TINY_QWEN3_5_VISION, **IMAGE_IDS}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {"vision_config": TINY_QWEN3_5_VISION, **IMAGE_IDS},
    ),
}


def main(directory: Path, names: list[str]) -> None:
    """Writes cases into directories of their own, replacing what was there."""
    logging.disable_progress_bar()
    for name in names or CASES:
        folder = directory / name
        for attempt in range(10):
            shutil.rmtree(folder, ignore_errors=True)
            seed = f"{name} {attempt}" if attempt else name
            rng = np.random.default_rng(zlib.crc32(seed.encode()))
            if write_case(folder, CASES[name], rng):
                break
        else:
            sys.exit(f"{name}: no draw whose greedy continuation is unambiguous")
        size = sum(path.stat().st_size for path in folder.iterdir())
        sys.stdout.write(f"{name}: {size / 1024:.0f} KiB\n")


def write_case(folder: Path, case: Case, rng: np.random.Generator) -> bool:
    """Writes one case; returns whether its greedy continuation is unambiguous."""
    write_checkpoint(folder, case, rng)
    if case.quantization is None:
        expected = compute_expected(folder, case)
    else:
        with tempfile.TemporaryDirectory() as plain:
            quantize(folder, case.quantization, Path(plain))
            expected = compute_expected(Path(plain), case)
    if expected is None:
        return False
    if case.renamed:
        raw = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", raw | {"model_type": case.renamed})
    np.savez(folder / "expected.npz", **expected)
    return True


def write_checkpoint(folder: Path, case: Case, rng: np.random.Generator) -> None:
    """Writes config.json and the weights."""
    model = loader(case).from_config(configure(case))
    # Their norms multiply by 1 + weight, but for the gated ones of delta nets.
    centred = case.model_type.startswith(("gemma", "qwen3_5", "qwen3_next"))
    centred = centred and not case.model_type.startswith("gemma4")
    # Buffers that are saved steer the choice of experts, and are float32 in files.
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in model.state_dict()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = draw(name, tuple(parameter.shape), rng)
            if case.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                values *= 3  # so that some gates are clamped
            gated = name.endswith("linear_attn.norm.weight")
            if centred and name.endswith("norm.weight") and not gated:
                values -= 1
            parameter.copy_(torch.from_numpy(values))
        drawn = {
            name: draw_buffer(name, tuple(buffer.shape), rng)
            for name, buffer in buffers.items()
        }
    model.to(getattr(torch, case.dtype))
    for name, module in model.named_modules():
        if name.endswith(("indexer.k_norm", "indexer.weights_proj")):
            module.float()
    for name, values in drawn.items():
        owner, _, leaf = name.rpartition(".")
        kept = torch.from_numpy(values)
        if leaf == "layer_scalar":
            kept = kept.to(getattr(torch, case.dtype))
        setattr(model.get_submodule(owner), leaf, kept)
    model.save_pretrained(folder, max_shard_size=case.max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if case.model_type == "qwen3_vl_moe" and case.old_keys:
        # Released files hold experts' matrices as [in, out].
        path = folder / "model.safetensors"
        tensors = {
            name: tensor.mT.contiguous() if ".experts." in name else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, {"format": "pt"})
    if case.model_type in ("qwen3_next", "nemotron_h") and case.old_keys:
        # Released files have layers for multi-token prediction.
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["mtp.norm.weight"] = torch.ones(case.config.get("hidden_size", 32))
        save_file(tensors, path, {"format": "pt"})
    if case.model_type == "kimi_k25":
        # As released: transformers 5.24 gives the text model's layers the name that
        # the vision tower's have.
        path, old = folder / "model.safetensors", "language_model.model.blocks."
        tensors = load_file(path)
        new = {name.replace(old, old[:-7] + "layers."): name for name in tensors}
        save_file({n: tensors[name] for n, name in new.items()}, path, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    if case.old_keys:
        raw = as_transformers_4(raw)
    write_json(folder / "config.json", raw)


def loader(case: Case) -> Any:
    """Returns the class that makes the model."""
    seeing = case.model_type in SEEING and case.model_type != "gemma3"
    return AutoModelForImageTextToText if seeing else AutoModelForCausalLM


def configure(case: Case) -> PretrainedConfig:
    """Returns the configuration; what sees has one of the text model inside."""
    entries = {**SMALL, **case.config}
    if case.rope is not None:
        entries["rope_parameters"] = case.rope
    if case.model_type in SEEING:
        text_type, others = SEEING[case.model_type]
        text = {"model_type": text_type, **entries}
        entries = {"text_config": text, **others}
        if "tie_word_embeddings" in text:
            entries["tie_word_embeddings"] = text["tie_word_embeddings"]
    return AutoConfig.for_model(case.model_type, **entries)


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws the values of one parameter."""
    if name.endswith("norm.weight"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    scale = 1.0 if "embed" in name or name.endswith("sinks") else 0.5
    if len(shape) == 2 and "embed" not in name and not name.endswith("bias"):
        scale = 1.5 / shape[1] ** 0.5
    if len(shape) == 3:
        # Keys that are nearly 0 would be noise when they have length 1.
        scale = 1.0 if name.endswith("linear_attn.conv1d.weight") else 0.3
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def draw_buffer(
    name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Draws the values of a buffer that is saved."""
    if name.endswith("layer_scalar"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return 0.2 * rng.standard_normal(shape).astype(np.float32)


def as_transformers_4(raw: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a config.json in the keys of transformers 4, by hand."""
    raw = dict(raw)
    if "dtype" in raw:
        raw["torch_dtype"] = raw.pop("dtype")
        raw["transformers_version"] = "4.44.0"
    if "text_config" in raw:
        text = raw["text_config"] = as_transformers_4(raw["text_config"])
        if raw["model_type"] == "qwen2_5_vl":
            # One dictionary, and a name of its own for the rotation.
            text["rope_scaling"]["type"] = "mrope"
            raw = {**raw.pop("text_config"), **raw}
        if raw["model_type"] == "kimi_k25":
            text["model_type"] = "kimi_k2"
        return raw
    family = raw["model_type"]
    if family == "nemotron_h":
        raw["hybrid_override_pattern"] = pattern_of(raw.pop("layers_block_type"))
        return raw
    parameters = dict(raw.pop("rope_parameters"))
    if "full_attention" in parameters:
        if family == "gemma3_text":
            raw["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = dict(parameters["full_attention"])
    raw["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        raw["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    kind = parameters.pop("rope_type")
    # The oldest files say "type", as Llamas with linear scaling did.
    oldest = family in TYPE_KEY or (family, kind) == ("llama", "linear")
    scaling = {"type" if oldest else "rope_type": kind, **parameters}
    raw["rope_scaling"] = scaling if parameters or kind != "default" else None
    if family not in EARLY_LAYER_TYPES:
        raw.pop("layer_types", None)
    additions = family_keys_of_transformers_4(raw)
    return raw | additions


def pattern_of(kinds: list[str]) -> str:
    """The letters that stand for kinds of layers in files of Nemotron-H."""
    letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
    return "".join(letters[kind] for kind in kinds)


def family_keys_of_transformers_4(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns what released files of a family say beyond the common changes.

    Removes from `raw` what they do not have.
    """
    family = raw["model_type"]
    if family == "gemma":
        return {"hidden_act": "gelu", "hidden_activation": None}
    if family == "gemma3_text":
        return {"sliding_window_pattern": raw.pop("_sliding_window_pattern")}
    if family == "qwen3_next":
        return {"full_attention_interval": 4}
    if family in ("qwen3_moe", "qwen3_vl_moe_text"):
        return {"num_experts": raw.pop("num_local_experts")}
    if family == "internlm3":
        return {"qkv_bias": raw.pop("attention_bias"), "bias": raw.pop("mlp_bias")}
    if family == "glm4_moe_lite":
        del raw["mlp_layer_types"]
        return {"first_k_dense_replace": 1, "topk_method": "noaux_tc"}
    if family in ("deepseek_v32", "glm_moe_dsa"):
        for key in ("mlp_layer_types", "indexer_types"):
            raw.pop(key, None)
        interleaved = {"indexer_rope_interleave": True, "rope_interleave": True}
        others = interleaved if family == "glm_moe_dsa" else {}
        return {"scoring_func": "sigmoid", "topk_method": "noaux_tc", **others}
    if family == "deepseek_v3":
        del raw["rope_interleave"]
        return {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}
    if family == "minimax_m2":
        share = raw.pop("partial_rotary_factor")
        return {
            "rotary_dim": int(share * raw["head_dim"]),
            "attn_type_list": [1] * raw["num_hidden_layers"],
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "use_mtp": True,
            "num_mtp_modules": 3,
            "mtp_transformer_layers": 1,
        }
    if family == "deepseek_v2":
        return {"scoring_func": "softmax", "moe_layer_freq": 1, "ep_size": 1}
    if family == "phi3" and raw["rope_scaling"]:
        # It stands outside, and transformers 4 refuses it inside.
        del raw["rope_scaling"]["original_max_position_embeddings"]
    if family == "gpt_oss":
        del raw["swiglu_alpha"]
        return {"experts_per_token": raw["num_experts_per_tok"]}
    return {}


def quantize(folder: Path, kind: str, plain: Path) -> None:
    """Quantizes a checkpoint in place and writes it dequantized into another folder."""
    raw = json.loads((folder / "config.json").read_text())
    write_json(plain / "config.json", raw)
    path = folder / "model.safetensors"
    stored, dequantized = {}, {}
    for name, tensor in load_file(path).items():
        values = tensor.float().numpy()
        matrix = "_proj" in name or ".experts." in name
        if kind == "fp8" and ".layers." in name and matrix:
            parts, weight = quantize_fp8(name, values)
        elif kind == "mxfp4" and name.endswith("_proj"):
            parts, weight = quantize_mxfp4(name, values)
        else:
            parts, weight = {name: tensor}, values
        stored |= parts
        dequantized[name] = torch.from_numpy(weight)
    save_file(stored, path, {"format": "pt"})
    save_file(dequantized, plain / path.name, {"format": "pt"})
    raw["quantization_config"] = QUANTIZATION_CONFIGS[kind]
    write_json(folder / "config.json", raw)


def quantize_fp8(
    name: str, values: np.ndarray
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Returns what is stored of a weight [out, in], and the weight it stands for."""
    codes, scales = encode_fp8(values, FP8_BLOCK)
    weight = decode_fp8(codes, scales, FP8_BLOCK)
    stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    unscaled = decode_fp8(codes, np.ones_like(scales), FP8_BLOCK)
    assert np.array_equal(stored.float().numpy(), unscaled), f"{name}: not torch's fp8"
    scale_name = f"{name}_scale_inv"
    return {name: stored, scale_name: torch.from_numpy(scales)}, weight


def quantize_mxfp4(
    name: str, values: np.ndarray
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Likewise of experts' weights [experts, in, out], stored [experts, out, in]."""
    blocks, scales = encode_mxfp4(values.swapaxes(1, 2))
    weight = np.ascontiguousarray(decode_mxfp4(blocks, scales).swapaxes(1, 2))
    stored = {
        f"{name}_blocks": torch.from_numpy(blocks),
        f"{name}_scales": torch.from_numpy(scales),
    }
    theirs = convert_moe_packed_tensors(*stored.values(), dtype=torch.float32)
    assert np.array_equal(theirs.numpy(), weight), f"{name}: not transformers' mxfp4"
    return stored, weight


def compute_expected(folder: Path, case: Case) -> dict[str, np.ndarray] | None:
    """Computes expected.npz in float32 from what lies on disk.

    Returns:
        None where the greedy continuation hangs on a tie.
    """
    rng = np.random.default_rng(zlib.crc32(b"tokens"))
    tokens = rng.integers(0, SMALL["vocab_size"], (2, case.length), dtype=np.int32)
    model, report = loader(case).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    # Their chunks differ from their own recurrence by 3e-4 where a row has several,
    # in float32; the recurrence is what is meant.
    code = sys.modules[type(model).__module__]
    if hasattr(code, "torch_chunk_gated_delta_rule"):
        code.torch_chunk_gated_delta_rule = code.torch_recurrent_gated_delta_rule
    problems = {key: value for key, value in report.items() if value}
    assert not problems, f"{folder}: {problems}"
    model.eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
        row = torch.from_numpy(tokens[:, :PROMPT]).long()
        for _ in range(CONTINUATION):
            # Without a cache, under which scaling that grows with the row has no
            # single meaning.
            best = model(row, use_cache=False).logits[:, -1].topk(2)
            if (best.values[:, 0] - best.values[:, 1]).min() < GREEDY_GAP:
                return None
            row = torch.cat([row, best.indices[:, :1]], dim=1)
    assert logits.dtype == np.float32
    greedy = row[:, PROMPT:].numpy().astype(np.int32)
    return {"tokens": tokens, "logits": logits, "greedy": greedy}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a configuration."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: make_fixtures.py DIRECTORY [NAME ...]")
    main(Path(sys.argv[1]), sys.argv[2:])
