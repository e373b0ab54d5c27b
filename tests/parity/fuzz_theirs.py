"""Compares mutated checkpoints that loaded with what transformers makes of them.

`tests/pretrained/fuzz_configs.py --keep DIRECTORY` writes them. This runs where torch
and transformers are:

    python tests/parity/fuzz_theirs.py DIRECTORY
"""
# pyright: reportMissingImports=false

import collections
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCE = 1e-4


def judge(base: Path, raw: dict[str, Any], ours: np.ndarray) -> tuple[str, str]:
    """Says whether transformers reads the same model, another, or none."""
    with tempfile.TemporaryDirectory() as folder:
        for file in base.glob("*.safetensors*"):
            (Path(folder) / file.name).symlink_to(file)
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        with np.load(base / "expected.npz") as stored:
            tokens = torch.from_numpy(stored["tokens"]).long()
        try:
            theirs, problems = score(folder, tokens)
        except Exception as error:
            return "theirs refuses", f"{type(error).__name__}: {error}"
    if problems:
        return "theirs refuses", f"weights: {problems}"
    gap = np.abs(theirs - ours).max()
    if gap < TOLERANCE * max(1.0, np.abs(theirs).max()):
        return "same", ""
    return "different", f"by {gap:g} of {np.abs(theirs).max():g}"


@torch.no_grad()
def score(folder: str, tokens: torch.Tensor) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns transformers' logits, and what it says of weights that do not fit."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    missing = {key: value for key, value in report.items() if value}
    return model.eval()(tokens, use_cache=False).logits.numpy(), missing


def main(folder: Path) -> int:
    """Prints where transformers differs; returns how often."""
    counts: collections.Counter[str] = collections.Counter()
    for file in sorted(folder.glob("*.json"), key=lambda path: int(path.stem)):
        case = json.loads(file.read_text())
        ours = np.load(file.with_suffix(".npy"))
        verdict, detail = judge(FIXTURES / case["base"], case["raw"], ours)
        counts[verdict] += 1
        if verdict != "same":
            print(f"{file.stem} {case['base']}: {case['change']}", flush=True)
            print(f"    {verdict}: {detail:.300}", flush=True)
    print(", ".join(f"{verdict}: {found}" for verdict, found in sorted(counts.items())))
    return counts["different"]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: fuzz_theirs.py DIRECTORY")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    sys.exit(main(Path(sys.argv[1])) > 0)
