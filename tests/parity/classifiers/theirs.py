"""Writes token classifiers with transformers, and looks at those that we saved.

Needs torch, transformers and numpy, and nothing of this repository:

    python tests/parity/classifiers/theirs.py write FIXTURES DIRECTORY [NAME ...]
    python tests/parity/classifiers/theirs.py check DIRECTORY SAVED

FIXTURES is what make_fixtures.py wrote. A classifier is the backbone of one of its
checkpoints under a random head; it has an expected.npz with `tokens` and float32
`logits` [rows, length, 2].
"""
# pyright: reportMissingImports=false

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForTokenClassification
from transformers.utils import logging

TOLERANCE = 1e-4
ROWS, LENGTH = 2, 10

# The checkpoint of a family, and the names of its labels; None for transformers' own.
CASES: dict[str, tuple[str, str] | None] = {
    "llama_mha": None,
    "qwen2_tied": ("correct", "incorrect"),
    "mistral_window": ("wrong", "right"),
    "mixtral": None,
    "qwen2_moe": None,
    "qwen3": ("False", "True"),
    "qwen3_moe": None,
    "gemma": None,
    "gemma2": ("+", "-"),
    "phi3_window": None,
    "smollm3": None,
    "seed_oss": None,
    "deepseek_v3": None,
    "gpt_oss": None,
}


def write(fixtures: Path, directory: Path, names: list[str]) -> None:
    """Writes classifiers in bfloat16, and what they say of each token."""
    for name in names or CASES:
        labels = CASES[name]
        options: dict[str, Any] = {"num_labels": 2}
        if labels is not None:
            options["id2label"] = dict(enumerate(labels))
            options["label2id"] = {label: i for i, label in enumerate(labels)}
        model = load(fixtures / name, **options)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        with torch.no_grad():
            for parameter in model.score.parameters():
                noise = 0.3 * rng.standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(noise))
            # Rounded, so that the file says exactly what was computed with.
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        tokens = np.load(fixtures / name / "expected.npz")["tokens"][:ROWS, :LENGTH]
        logits = score(model, tokens)
        # Tensors that are float32 on disk, such as a bias that selects experts, stay
        # so.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        model.config.dtype = torch.bfloat16
        model.save_pretrained(directory / name)
        np.savez(directory / name / "expected.npz", tokens=tokens, logits=logits)
        sys.stdout.write(f"{name}\n")


def check(directory: Path, saved: Path) -> None:
    """Loads what we saved of the classifiers and compares the verdicts."""
    folders = sorted(path.parent for path in directory.glob("*/expected.npz"))
    assert folders, f"{directory}: no classifiers"
    largest = 0.0
    for folder in folders:
        model, report = load(saved / folder.name, output_loading_info=True)
        problems = {key: value for key, value in report.items() if value}
        assert not problems, f"{saved / folder.name}: {problems}"
        assert type(model).__name__ in model.config.architectures, folder
        assert model.config.id2label == {0: "wrong", 1: "right"}, folder
        expected = np.load(folder / "expected.npz")
        found, theirs = score(model, expected["tokens"]), expected["logits"]
        if (CASES[folder.name] or ("", ""))[0] in ("correct", "+"):
            theirs = theirs[..., ::-1]
        gap = float(np.abs(found - theirs).max())
        assert gap < TOLERANCE, f"{folder}: logits differ by {gap}"
        largest = max(largest, gap)
    sys.stdout.write(
        f"{len(folders)} token classifiers of ours load, largest difference of logits "
        f"{largest:.1e}\n"
    )


def load(folder: Path, **options: Any) -> Any:
    """Loads a checkpoint of transformers in float32."""
    return AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )


def score(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of a forward without dropout."""
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens).long()).logits.numpy()


if __name__ == "__main__":
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    action, *rest = sys.argv[1:] or [""]
    if action == "write" and len(rest) >= 2:
        write(Path(rest[0]), Path(rest[1]), rest[2:])
    elif action == "check" and len(rest) == 2:
        check(Path(rest[0]), Path(rest[1]))
    else:
        sys.exit(__doc__)
