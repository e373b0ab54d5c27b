"""Writes what transformers computes of pictures: patches, embeddings, positions.

Needs torch, torchvision, transformers, numpy, safetensors and Pillow, and nothing of
this repository:

    python tests/parity/make_vision_fixtures.py DIRECTORY

Every tensor of a tower is random, norms and biases included.
"""
# pyright: reportMissingImports=false

import io
import json
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CASES
from make_fixtures import configure, write_json
from PIL import Image, ImageOps
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import (
    Qwen2VLImageProcessor,
)
from transformers.utils import logging

TINY = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_heads": 2,
    "out_hidden_size": 12,
    "patch_size": 4,
}
# Whole windows of 2 x 2 tokens and cut ones, and a picture of one token.
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**TINY, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {
        **TINY,
        "depth": 4,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
    "qwen3_5": {**TINY, "depth": 2, "num_position_embeddings": 16},
}
GRIDS = [(4, 6), (10, 6), (2, 2), (2, 14)]

# A processor's values, and the (height, width) of pictures.
PROCESSORS: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "small": (
        {
            "patch_size": 4,
            "size": {"shortest_edge": 256, "longest_edge": 1024},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        [(1, 1), (16, 16), (12, 20), (7, 150), (100, 3), (33, 47), (4, 64), (61, 62)],
    ),
    "qwen2_5_vl": (
        {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12544},
        [(65, 43)],
    ),
    "qwen3_vl": (
        {
            "patch_size": 16,
            "size": {"shortest_edge": 4096, "longest_edge": 16384},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        [(150, 90)],
    ),
}


def main(directory: Path) -> None:
    """Writes the fixtures, in place of files with the same names."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    for name in TOWERS:
        write_tower(directory / name, name)
        write_positions(directory / name, name)
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    write_patches(directory / "pictures")
    write_modes(directory / "pictures")
    for path in sorted(directory.rglob("*.*")):
        size = path.stat().st_size
        sys.stdout.write(f"{path.relative_to(directory)}: {size / 1024:.0f} KiB\n")


def generator(name: str) -> np.random.Generator:
    """Returns the random numbers of one fixture."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def drawn(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws a parameter of a tower, so large that attention is far from uniform."""
    if "norm" in name or "ln_q" in name:
        low, high = (0.5, 1.5) if name.endswith("weight") else (-0.5, 0.5)
        return rng.uniform(low, high, shape).astype(np.float32)
    scale = 0.5 if len(shape) == 1 else 1.5 / np.prod(shape[1:]) ** 0.5
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def write_tower(folder: Path, name: str) -> None:
    """Writes a tower's config and weights, its embeddings and gradients."""
    rng = generator(f"tower {name}")
    whole = AutoConfig.for_model(name, vision_config=TOWERS[name])
    model = AutoModel.from_config(whole.vision_config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(drawn(key, tuple(parameter.shape), rng)))
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"model_type": name, "vision_config": whole.vision_config.to_dict()}
    write_json(folder / "config.json", raw)
    weights = {
        f"model.visual.{key}": value.contiguous()
        for key, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    grids = torch.tensor([(1, *grid) for grid in GRIDS])
    width = 3 * 2 * TINY["patch_size"] ** 2
    pixels = rng.standard_normal((int(grids.prod(-1).sum()), width)).astype(np.float32)
    output = model(torch.from_numpy(pixels), grid_thw=grids, return_dict=True)
    levels = getattr(output, "deepstack_features", None) or []
    found = [output.pooler_output, *levels]
    # Gradients of about 1: between frameworks they differ in proportion to their size.
    factors = [
        0.1 * rng.standard_normal(tuple(each.shape)).astype(np.float32)
        for each in found
    ]
    loss = sum(
        (each * torch.from_numpy(factor)).sum()
        for each, factor in zip(found, factors, strict=True)
    )
    loss.backward()
    gradients = {
        f"gradient.model.visual.{key}": parameter.grad.numpy()
        for key, parameter in model.named_parameters()
    }
    np.savez_compressed(
        folder / "expected.npz",
        grids=np.array(GRIDS, np.int32),
        pixels=pixels,
        embeddings=found[0].detach().numpy(),
        levels=np.array([each.detach().numpy() for each in found[1:]], np.float32),
        factors=np.array(factors),
    )
    np.savez_compressed(folder / "gradients.npz", **gradients)


# For each row the lengths of texts around its pictures, and the pictures' grids.
ROWS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([3, 4], [(4, 6)]),
    ([1, 2, 5], [(2, 2), (8, 4)]),
    ([7], []),
    ([2, 1, 1, 1], [(2, 10), (6, 2), (4, 4)]),
    ([0, 3], [(4, 2)]),
    ([2, 0], [(2, 6)]),
]


def write_positions(folder: Path, name: str) -> None:
    """Writes rows with pictures, and their positions and rotations."""
    config = configure(CASES[name])
    model = AutoModel.from_config(config)
    found: dict[str, np.ndarray] = {}
    for index, (texts, grids) in enumerate(ROWS):
        kinds: list[int] = [0] * texts[0]
        for text, (rows, columns) in zip(texts[1:], grids, strict=True):
            kinds += [1] * (rows * columns // 4) + [0] * text
        types = torch.tensor([kinds])
        grid = torch.tensor([(1, *each) for each in grids]) if grids else None
        positions, delta = model.get_rope_index(
            torch.zeros_like(types), types, image_grid_thw=grid
        )
        found[f"types.{index}"] = np.array(kinds, np.int32)
        found[f"grids.{index}"] = np.array(grids, np.int32).reshape(-1, 2)
        found[f"positions.{index}"] = positions[:, 0].numpy().astype(np.int32)
        found[f"delta.{index}"] = delta[0].numpy().astype(np.int32)
        dtype = torch.zeros(1, dtype=torch.float32)
        cosines, sines = model.language_model.rotary_emb(dtype, positions)
        found[f"cosines.{index}"] = cosines[0].numpy()
        found[f"sines.{index}"] = sines[0].numpy()
    rope = dict(config.text_config.rope_parameters)
    rope["sections"] = list(model.language_model.rotary_emb.mrope_section)
    found["rope"] = np.frombuffer(json.dumps(rope).encode(), np.uint8)
    np.savez_compressed(folder / "positions.npz", **found)


def scenery(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A picture with large and small structures, and saturated edges."""
    rows, columns = np.mgrid[:height, :width]
    waves = [
        np.sin(rows * rng.uniform(0.02, 0.9) + columns * rng.uniform(0.02, 0.9))
        for _ in range(3)
    ]
    values = (
        128 + 140 * np.stack(waves, axis=-1) + rng.normal(0, 20, (height, width, 3))
    )
    return values.clip(0, 255).astype(np.uint8)


def write_patches(folder: Path) -> None:
    """Writes pictures and their patches by both of transformers' processors."""
    rng = generator("patches")
    for name, (values, sizes) in PROCESSORS.items():
        slow, fast = Qwen2VLImageProcessorPil(**values), Qwen2VLImageProcessor(**values)
        found: dict[str, np.ndarray] = {}
        for index, size in enumerate(sizes):
            picture = scenery(rng, *size)
            image = Image.fromarray(picture)
            theirs = slow(image, return_tensors="np")
            others = fast(image, return_tensors="pt")
            found[f"picture.{index}"] = picture
            found[f"patches.{index}"] = theirs["pixel_values"].astype(np.float32)
            found[f"torchvision.{index}"] = others["pixel_values"].numpy()
            found[f"grid.{index}"] = theirs["image_grid_thw"][0, 1:].astype(np.int32)
            assert np.array_equal(theirs["image_grid_thw"], others["image_grid_thw"])
        np.savez_compressed(folder / f"{name}.npz", **found)
        raw = {"image_processor_type": "Qwen2VLImageProcessorFast", **values}
        write_json(folder / f"{name}.json", raw)


def write_modes(folder: Path) -> None:
    """Writes files of many modes of Pillow, and what transformers makes of them."""
    rng = generator("modes")
    colours = Image.fromarray(scenery(rng, 9, 14))
    alpha = Image.fromarray(rng.integers(0, 256, (9, 14), np.uint8))
    grey = colours.convert("L")
    seen = colours.copy()
    seen.putalpha(alpha)
    both = grey.copy()
    both.putalpha(alpha)
    palette = colours.quantize(16)
    orientations = {}
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[274] = turn
        orientations[f"turned_{turn}.png"] = (colours, {"exif": exif})
    files: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "RGB.png": (colours, {}),
        "L.png": (grey, {}),
        "1.png": (grey.convert("1"), {}),
        "P.png": (palette, {}),
        "P_transparent.png": (palette, {"transparency": 3}),
        "P_alphas.png": (palette, {"transparency": bytes(range(0, 256, 16))}),
        "RGB_transparent.png": (colours, {"transparency": colours.getpixel((2, 3))}),
        "L_transparent.png": (grey, {"transparency": grey.getpixel((2, 3))}),
        "RGBA.png": (seen, {}),
        "LA.png": (both, {}),
        "RGBA.webp": (seen, {"lossless": True}),
        "RGB.bmp": (colours, {}),
        "still.gif": (palette, {}),
        "CMYK.tif": (colours.convert("CMYK"), {}),
        "YCbCr.tif": (colours.convert("YCbCr"), {}),
        "turned.jpg": (colours, {"exif": orientations["turned_6.png"][1]["exif"]}),
        "CMYK.jpg": (colours.convert("CMYK"), {}),
        **orientations,
    }
    processor = Qwen2VLImageProcessorPil()
    found: dict[str, np.ndarray] = {}
    for name, (image, options) in files.items():
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            formats = {"jpg": "JPEG", "tif": "TIFF"}
            kind = name.rpartition(".")[2]
            image.save(buffer, formats.get(kind, kind.upper()), **options)
            opened = ImageOps.exif_transpose(Image.open(buffer))
            # As the processor takes a picture in, channels first.
            pixels = processor.process_image(opened, do_convert_rgb=True)
        found[f"file {name}"] = np.frombuffer(buffer.getvalue(), np.uint8)
        found[f"pixels {name}"] = np.moveaxis(pixels, 0, -1)
    np.savez_compressed(folder / "modes.npz", **found)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_vision_fixtures.py DIRECTORY")
    main(Path(sys.argv[1]))
