"""Checks with torch and transformers what save_ours.py wrote.

    python tests/parity/check_saved.py FIXTURES SAVED

Every saved checkpoint must load without a missing or an unexpected tensor, hold the
fixture's tensors bit for bit, and give the fixture's logits. Runs under transformers 4
and 5, which read different keys of config.json.
"""
# pyright: reportMissingImports=false

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

TOLERANCE = 1e-4


def check(fixture: Path, saved: Path, dtype: torch.dtype | str) -> float:
    """Checks one checkpoint and returns the largest difference of its logits."""
    model, report = AutoModelForCausalLM.from_pretrained(
        saved, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in report.items() if value}
    assert not problems, f"{saved}: {problems}"
    state = model.state_dict()
    for path in sorted(fixture.glob("*.safetensors")):
        for name, expected in load_file(path).items():
            found = state[name]
            if dtype == "auto":
                assert found.dtype == expected.dtype, f"{saved}: {name} {found.dtype}"
            same = torch.equal(found, expected.to(found.dtype))
            assert same, f"{saved}: {name} changed"
    stored = np.load(fixture / "expected.npz")
    with torch.no_grad():
        logits = model.float().eval()(torch.from_numpy(stored["tokens"]).long()).logits
    gap = float(np.abs(logits.numpy() - stored["logits"]).max())
    assert gap < TOLERANCE, f"{saved}: logits differ by {gap}"
    return gap


def main(fixtures: Path, saved: Path) -> None:
    """Checks every fixture in both of the forms that save_ours.py wrote."""
    logging.disable_progress_bar()
    folders = sorted(path.parent for path in fixtures.glob("*/expected.npz"))
    assert folders, f"{fixtures}: no fixtures"
    gaps = []
    for folder in folders:
        gaps.append(check(folder, saved / "as_stored" / folder.name, "auto"))
        shards = saved / "float32_shards" / folder.name
        assert (shards / "model.safetensors.index.json").is_file(), shards
        gaps.append(check(folder, shards, torch.float32))
    sys.stdout.write(
        f"transformers {transformers.__version__}: {len(gaps)} saved checkpoints load, "
        f"tensors equal, largest difference of logits {max(gaps):.1e}\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: check_saved.py FIXTURES SAVED")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
