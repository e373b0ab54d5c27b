"""GGUF files as llama.cpp's converter writes them, and what their model computes."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 64, 4, 2, 16, 256, 2
EPS, THETA = 1e-5, 100000.0

# Expressions with which llama.cpp splits a text, one after the other.
GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
)  # fmt: skip
CASELESS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, Sequence[str]] = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + AFTER,),
    "qwen2": (CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + AFTER,),
}

TEXTS = (
    "What is 47 plus 38? It's 85, isn't it?",
    "I'LL say: don't, WE'RE here, they've 1234567 things; x=3.14!",
    "  two  spaces\t\ttabs\n\nlines \r\n  and an end   ",
    "naïve façade, 日本語のテキスト, Ωμέγα, 🙂🙂, cafe\u0301, ½ and ² and ٣٤",
    "def f(x):\n    return x['a'] + \"b\"\n\n\n# done",
    "",
    " ",
)
END, START = "<|end|>", "<|start|>"


@functools.cache
def trained(split: str) -> tokenizers.Tokenizer:
    """A byte-level BPE that splits as llama.cpp does, with two special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(tokenizers.Regex(each), "isolated")
                for each in SPLITS[split]
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END, START],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS] * 3, trainer)
    return backend


def tokenizer_keys(split: str = "smollm") -> dict[str, Any]:
    """The metadata of `trained`."""
    model = _model(split)
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['role'] }} "
        "{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant {% endif %}",
    }


@functools.cache
def _model(split: str) -> dict[str, Any]:
    return json.loads(trained(split).to_str())["model"]


def keys(architecture: str = "llama") -> dict[str, Any]:
    """The metadata of a model."""
    own = {
        "vocab_size": len(tokenizer_keys()["tokenizer.ggml.tokens"]),
        "context_length": 512,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.freq_base": THETA,
        "rope.dimension_count": HEAD_DIM,
    }
    return {
        "general.architecture": architecture,
        "general.type": "model",
        **{f"{architecture}.{name}": value for name, value in own.items()},
        **tokenizer_keys(),
    }


def tensors(architecture: str = "llama", *, tied: bool = True) -> dict[str, np.ndarray]:
    """Random tensors of a model, float32, in GGUF's names and order of rows."""
    vocab = len(tokenizer_keys()["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (FFN, HIDDEN),
            "ffn_up.weight": (FFN, HIDDEN),
            "ffn_down.weight": (HIDDEN, FFN),
        }
        if architecture == "qwen2":
            block |= {f"attn_{x}.bias": block[f"attn_{x}.weight"][:1] for x in "qkv"}
        if architecture == "qwen3":
            block |= {f"attn_{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output.weight"] = (vocab, HIDDEN)
    rng = np.random.default_rng(0)
    return {
        name: rng.normal("norm" in name, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(
    path: Path,
    metadata: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    *,
    kind: Callable[[str], str] = lambda name: "F32",
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Writes a GGUF file; matrices are quantised to `kind` of their name."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"], endianess=endian)
    for name, value in metadata.items():
        _add(writer, name, value)
    for name, value in values.items():
        wanted = gguf.GGMLQuantizationType[kind(name) if value.ndim > 1 else "F32"]
        if value.dtype == np.uint8:  # quantised by the caller
            writer.add_tensor(name, value, raw_dtype=wanted)
        else:
            writer.add_tensor(name, gguf.quantize(value, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if name == "general.architecture":
        return
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def logits(
    architecture: str,
    values: Mapping[str, np.ndarray],
    ids: Sequence[int],
    divisors: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Logits [length, vocab] as llama.cpp computes them, in float64.

    In llama a rotation turns neighbouring dims of a head, in Qwen's models a dim and
    the one half a head further.
    """
    v = {name: value.astype(np.float64) for name, value in values.items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight

    half = HEAD_DIM // 2
    frequencies = THETA ** -(np.arange(half) / half) / divisors
    angles = np.arange(len(ids))[:, None, None] * frequencies
    turns = np.exp(1j * angles)

    def rotated(x: np.ndarray) -> np.ndarray:
        if architecture == "llama":
            pairs = x[..., ::2] + 1j * x[..., 1::2]
        else:
            pairs = x[..., :half] + 1j * x[..., half:]
        pairs = pairs * turns
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = v["token_embd.weight"][list(ids)]
    visible = np.tril(np.ones((len(ids), len(ids)), bool))
    for layer in range(LAYERS):
        b = {
            k.split(".", 2)[2]: a for k, a in v.items() if k.startswith(f"blk.{layer}.")
        }
        h = norm(x, b["attn_norm.weight"])
        q, k, w = (
            (h @ b[f"attn_{n}.weight"].T + b.get(f"attn_{n}.bias", 0)).reshape(
                len(ids), -1, HEAD_DIM
            )
            for n in "qkv"
        )
        if architecture == "qwen3":
            q, k = norm(q, b["attn_q_norm.weight"]), norm(k, b["attn_k_norm.weight"])
        k, w = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (rotated(k), w))
        scores = np.einsum("qhd,khd->hqk", rotated(q), k) / np.sqrt(HEAD_DIM)
        shares = np.exp(np.where(visible, scores, -np.inf))
        shares /= shares.sum(-1, keepdims=True)
        heads = np.einsum("hqk,khd->qhd", shares, w).reshape(len(ids), -1)
        x = x + heads @ b["attn_output.weight"].T
        h = norm(x, b["ffn_norm.weight"])
        gate = h @ b["ffn_gate.weight"].T
        gate = gate / (1 + np.exp(-gate))
        x = x + (gate * (h @ b["ffn_up.weight"].T)) @ b["ffn_down.weight"].T
    head = v.get("output.weight", v["token_embd.weight"])
    return norm(x, v["output_norm.weight"]) @ head.T
