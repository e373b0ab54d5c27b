"""Mutated config.json files, and what loading a checkpoint under each leads to.

A config.json comes from anywhere. For all its contents, a checkpoint must load to the
right numbers or be refused by an error that names the file and the key. `test_fuzz.py`
runs a few hundred mutations; thousands run by

    python -m tests.pretrained.fuzz_configs --count 16000 --keep DIRECTORY

which writes the mutations that loaded, with their logits, for
`tests/parity/fuzz_theirs.py` to compare with transformers.
"""

import argparse
import collections
import functools
import json
import logging
import math
import random
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_post import pretrained
from jaxrl_post.models import forward, logits
from jaxrl_post.pretrained import CheckpointError

FIXTURES = Path(__file__).parents[1] / "parity" / "fixtures"
LAYERS = ["full_attention", "sliding_attention"]

# Values of every JSON type, and numbers at the edges of what arithmetic takes.
POOL: list[Any] = [
    None, True, False, 0, 1, 2, 3, 4, 7, 8, 16, 32, 64, -1, -7, 2**31, 2**40, 2**70,
    10**400, 0.0, 0.5, 1.0, 1.5, -0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf,
    "", "x", "1", "silu", "gelu", "relu", "gelu_new", [], [0], [1, 0], ["x"], {},
    {"a": 1}, {"full_attention": None}, LAYERS, LAYERS[::-1], LAYERS[:1] * 2,
]  # fmt: skip

# Keys that change numbers in transformers and that no fixture has.
FURTHER_KEYS = [
    "is_causal", "is_bidirectional", "use_bidirectional_attention", "per_layer_config",
    "num_nextn_predict_layers", "num_mtp_layers", "layer_types", "rope_scaling",
    "rope_parameters", "rope_theta", "partial_rotary_factor", "head_dim", "clip_qkv",
    "no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern",
    "sliding_window", "original_max_position_embeddings", "rope_local_base_freq",
    "architectures",
    "text_config", "num_experts", "num_local_experts", "mlp_only_layers", "dtype",
    "torch_dtype", "quantization_config", "id2label", "hidden_activation",
    "num_key_value_heads", "norm_topk_prob", "use_sliding_window", "rope_interleave",
    "q_lora_rank", "final_logit_softcapping", "tie_word_embeddings",
]  # fmt: skip

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False,
     "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
     "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16},
]  # fmt: skip

INNER_KEYS = [
    "rope_type", "type", "factor", "rope_theta", "partial_rotary_factor", "beta_fast",
    "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
    "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "short_factor", "long_factor",
]  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A fixture's name, what was changed, and the config.json that results."""

    base: str
    change: str
    raw: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of loading.

    Attributes:
        kind: "refused" by a clear error, "loaded", "warned", or a defect: "unclear",
            "not finite", "slow".
        detail: the message.
        logits: of the fixture's tokens, where it loaded.
    """

    kind: str
    detail: str = ""
    logits: np.ndarray | None = None


DEFECTS = ("unclear", "not finite", "slow", "different")
# Refusing takes milliseconds, a loop over a count takes minutes.
SLOW_SECONDS = 20.0


@functools.cache
def bases() -> dict[str, dict[str, Any]]:
    """The config.json of every fixture."""
    files = sorted(FIXTURES.glob("*/config.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def mutations(seed: int, count: int, names: Sequence[str] = ()) -> Iterator[Mutation]:
    """Yields mutations, the same ones for the same seed.

    Args:
        seed: of the choices.
        count: of the mutations.
        names: of fixtures; none for all of them.
    """
    rng = random.Random(seed)
    keys = {key for raw in bases().values() for key in raw}
    known = sorted({*keys, *FURTHER_KEYS} - {"model_type"})
    names = names or list(bases())
    for _ in range(count):
        base = rng.choice(names)
        raw = json.loads(json.dumps(bases()[base]))
        changes = [_mutate(rng, raw, known) for _ in range(rng.choice([1, 1, 1, 2]))]
        yield Mutation(base, "; ".join(changes), raw)


def _mutate(rng: random.Random, raw: dict[str, Any], known: list[str]) -> str:
    if isinstance(raw.get("text_config"), dict) and rng.random() < 0.8:
        return "text_config: " + _mutate(rng, raw["text_config"], known)
    kind = rng.choice(
        ["value", "value", "own", "own", "delete", "rope", "rope", "other"]
    )
    if kind == "rope":
        return _mutate_rope(rng, raw)
    own = sorted(raw.keys() - {"model_type"})
    if not own:
        return "nothing"
    key = rng.choice(known if kind in ("value", "other") else own)
    if kind == "delete":
        return f"without {key}: {raw.pop(key, None)!r:.40}"
    if kind == "other":
        value = rng.choice(list(bases().values())).get(key)
    elif kind == "own" and type(raw[key]) in (int, float):
        value = rng.choice([raw[key] * 2, raw[key] + 1, raw[key] - 1, -raw[key], None])
    else:
        value = rng.choice(POOL)
    raw[key] = value
    return f"{key} = {value!r:.60}"


def _mutate_rope(rng: random.Random, raw: dict[str, Any]) -> str:
    """Gives it another rotation, flat or by kind of layer, in either spelling."""
    rope = dict(rng.choice(ROPES))
    if rng.random() < 0.5:
        rope["rope_theta"] = rng.choice([500.0, 10000.0, 500000.0])
    if rng.random() < 0.6:
        key = rng.choice(INNER_KEYS)
        rope[key] = rng.choice(POOL)
    if rng.random() < 0.3:
        rope = {"full_attention": rope, "sliding_attention": dict(rng.choice(ROPES))}
        if rng.random() < 0.3:
            rope[rng.choice(list(rope))] = rng.choice(POOL)
    key = rng.choice(["rope_scaling", "rope_parameters"])
    if rng.random() < 0.7:
        raw.pop("rope_scaling", None)
        raw.pop("rope_parameters", None)
    if rng.random() < 0.3:
        raw.pop("rope_theta", None)
    raw[key] = rope
    return f"{key} = {rope!r:.200}"


def try_config(mutation: Mutation, folder: Path) -> Outcome:
    """Loads a fixture's weights under a mutated config.json, and runs them.

    Args:
        mutation: of a fixture's config.
        folder: an empty directory.
    """
    for file in (FIXTURES / mutation.base).glob("*.safetensors*"):
        (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(mutation.raw))
    return try_directory(folder, tokens_of(mutation.base))


def try_directory(folder: Path, tokens: np.ndarray) -> Outcome:
    """Loads a model directory and runs it."""
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = _logits(folder, tokens)
        except CheckpointError as error:
            outcome = Outcome("refused" if _is_clear(error) else "unclear", str(error))
        except Exception as error:  # Which ones there are is what is looked for.
            outcome = Outcome("unclear", f"{type(error).__name__}: {error}")
        else:
            finite = bool(np.isfinite(found).all())
            said = " | ".join(str(warning.message) for warning in caught)
            kind = "warned" if said else "loaded" if finite else "not finite"
            outcome = Outcome(kind, said, found)
    if time.process_time() - start > SLOW_SECONDS:
        return Outcome(
            "slow", f"{time.process_time() - start:.0f} s of CPU; {outcome.detail}"
        )
    return outcome


def _is_clear(error: CheckpointError) -> bool:
    """Whether a message says where (a file) and what (a key or a tensor)."""
    return bool(re.search(r"\.(json|safetensors)[:;]? \w", str(error)))


@functools.cache
def tokens_of(base: str) -> np.ndarray:
    with np.load(FIXTURES / base / "expected.npz") as stored:
        return stored["tokens"]


def _logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    config, params = pretrained.load(folder, dtype=jnp.float32)
    return np.asarray(
        logits(params, config, forward(params, config, jnp.asarray(tokens)))
    )


def main(seed: int, count: int, keep: Path | None) -> int:
    """Runs mutations and prints what they led to; returns the number of defects."""
    counts: collections.Counter[str] = collections.Counter()
    if keep is not None:
        keep.mkdir(parents=True)
    for number, mutation in enumerate(mutations(seed, count)):
        with tempfile.TemporaryDirectory() as folder:
            outcome = try_config(mutation, Path(folder))
        counts[outcome.kind] += 1
        if outcome.kind in DEFECTS:
            print(f"{number} {mutation.base}: {mutation.change}", flush=True)
            print(f"    {outcome.kind}: {outcome.detail:.300}", flush=True)
        if keep is not None and outcome.logits is not None:
            case = {"base": mutation.base, "change": mutation.change}
            (keep / f"{number}.json").write_text(
                json.dumps({**case, "raw": mutation.raw})
            )
            np.save(keep / f"{number}.npy", outcome.logits)
    print(", ".join(f"{kind}: {found}" for kind, found in sorted(counts.items())))
    return sum(counts[kind] for kind in DEFECTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=16_000)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    raise SystemExit(main(options.seed, options.count, options.keep) > 0)
