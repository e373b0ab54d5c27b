"""Loads with transformers what train_families.py trained and saved.

python tests/parity/check_trained.py TRAINED
"""
# pyright: reportMissingImports=false

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging

TOLERANCE = 1e-4


def main(trained: Path) -> None:
    """Compares logits, family by family."""
    logging.disable_progress_bar()
    gaps = {}
    for folder in sorted(path.parent for path in trained.glob("*/expected.npz")):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder / "run" / "model",
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        problems = {key: value for key, value in report.items() if value}
        assert not problems, f"{folder}: {problems}"
        stored = np.load(folder / "expected.npz")
        with torch.no_grad():
            found = model.eval()(torch.from_numpy(stored["tokens"]).long()).logits
        gaps[folder.name] = float(np.abs(found.numpy() - stored["logits"]).max())
        assert gaps[folder.name] < TOLERANCE, f"{folder}: {gaps[folder.name]}"
    assert gaps, f"{trained}: nothing to compare"
    sys.stdout.write(
        f"transformers {transformers.__version__}: {len(gaps)} trained models load, "
        f"largest difference of logits {max(gaps.values()):.1e}\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_trained.py TRAINED")
    main(Path(sys.argv[1]))
