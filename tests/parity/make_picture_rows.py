"""Writes what transformers computes of rows with pictures, for whole models.

Needs torch, transformers and numpy, and nothing of this repository:

    python tests/parity/make_picture_rows.py write FIXTURES DIRECTORY
    python tests/parity/make_picture_rows.py check FIXTURES SAVED

`check` loads the whole models that test_picture_rows.py saves, and compares.
"""
# pyright: reportMissingImports=false

import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

NAMES = (
    "qwen2_5_vl", "qwen2_5_vl_tied", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe",
)  # fmt: skip
LENGTH, MERGE, GREEDY = 24, 2, 12
FILE = "model.safetensors"
# For each row the place and the grid, in patches, of its pictures.
ROWS = (((2, (4, 6)), (12, (2, 2))), ((0, (6, 4)), (9, (2, 4))))


def write(fixtures: Path, directory: Path) -> None:
    """Writes one file a model."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        np.savez_compressed(directory / f"{name}.npz", **computed(fixtures / name))


def check(fixtures: Path, saved: Path) -> None:
    """Asserts that transformers reads what we save, tensor for tensor."""
    for name in NAMES:
        ours, theirs = computed(saved / name), computed(fixtures / name)
        for key, value in theirs.items():
            assert np.allclose(ours[key], value, atol=1e-4), f"{name}: {key}"
        own, other = (load_file(d / name / FILE) for d in (saved, fixtures))
        assert own.keys() == other.keys(), f"{name}: {own.keys() ^ other.keys()}"
        for key, stored in other.items():
            tensor = stored
            # Released files, as ours, hold experts' matrices as [in, out].
            if own[key].shape != tensor.shape:
                tensor = tensor.mT
            same = torch.equal(own[key], tensor.to(own[key].dtype))
            assert same, f"{name}: {key} changed"
    sys.stdout.write(f"{len(NAMES)} whole models load, tensors equal\n")


def computed(folder: Path) -> dict[str, np.ndarray]:
    """Tokens, patches, logits, and greedy tokens after the first row."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager",
    ).eval()  # fmt: skip
    code = sys.modules[type(model).__module__]
    if hasattr(code, "torch_chunk_gated_delta_rule"):
        code.torch_chunk_gated_delta_rule = code.torch_recurrent_gated_delta_rule
    rng = np.random.default_rng(zlib.crc32(folder.name.encode()))
    image = model.config.image_token_id
    vision = model.config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    tokens = rng.integers(0, 60, (len(ROWS), LENGTH))
    grids = []
    for row, spans in enumerate(ROWS):
        for start, grid in spans:
            tokens[row, start : start + grid[0] * grid[1] // MERGE**2] = image
            grids.append(grid)
    pixels = rng.standard_normal((sum(a * b for a, b in grids), width))
    whole = [(1, *grid) for grid in grids]
    ids = torch.from_numpy(tokens).long()
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == image).int(),
            pixel_values=torch.from_numpy(pixels).float(),
            image_grid_thw=torch.tensor(whole),
        ).logits
        plain = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        first = len(ROWS[0])
        greedy = model.generate(
            input_ids=ids[:1],
            attention_mask=torch.ones_like(ids[:1]),
            mm_token_type_ids=(ids[:1] == image).int(),
            pixel_values=torch.from_numpy(
                pixels[: sum(a * b for a, b in grids[:first])]
            ).float(),
            image_grid_thw=torch.tensor(whole[:first]),
            max_new_tokens=GREEDY,
            do_sample=False,
            eos_token_id=None,
        )[0, LENGTH:]
    assert (logits - plain).abs().max() > 0.1
    return {
        "tokens": tokens.astype(np.int32),
        "pixels": pixels.astype(np.float32),
        "grids": np.array(grids, np.int32),
        "logits": logits.numpy(),
        "greedy": greedy.numpy().astype(np.int32),
    }


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("write", "check"):
        sys.exit("usage: make_picture_rows.py write|check FIXTURES DIRECTORY")
    logging.set_verbosity_error()
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
