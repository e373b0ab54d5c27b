"""Corrupted checkpoints, and what loading them leads to.

Files are cut off by downloads, zeroed by disks, mixed up by scripts and edited by hand.
Loading one must lead to the right numbers, to an error that names the file, or to a
warning that does. What no reader can see is left out: neither safetensors nor Orbax has
checksums, so one number changed into another is not noticed. `test_fuzz.py` runs a few
dozen corruptions; more run by

    python -m tests.pretrained.fuzz_files --count 1200
"""

import argparse
import collections
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.pretrained.fuzz_configs import (
    DEFECTS,
    FIXTURES,
    POOL,
    Outcome,
    tokens_of,
    try_directory,
)

# In one file, in shards, quantised, with joined tensors, and inside a larger model.
BASES = (
    "llama_mha", "llama_shards", "mixtral_shards_window", "qwen3", "gemma3_nested",
    "deepseek_v3", "deepseek_v3_fp8", "gpt_oss", "gpt_oss_mxfp4", "phi3_window",
)  # fmt: skip

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Corruption:
    """A fixture's name, and what was done to its files."""

    base: str
    change: str


def corrupt(
    rng: random.Random, folder: Path, names: Sequence[str] = BASES
) -> Corruption:
    """Copies one of some fixtures into an empty directory and damages it."""
    base = rng.choice(names)
    for file in (FIXTURES / base).iterdir():
        if file.suffix != ".npz":
            shutil.copyfile(file, folder / file.name)
    damage = rng.choice(DAMAGES)
    return Corruption(base, f"{damage.__name__}: {damage(rng, folder)}")


def try_corruption(corruption: Corruption, folder: Path) -> Outcome:
    """Loads and runs what `corrupt` made.

    Numbers other than the undamaged ones, without a word, are the defect "different".
    """
    outcome = try_directory(folder, tokens_of(corruption.base))
    if outcome.kind != "loaded" or "config_value" in corruption.change:
        return outcome
    with np.load(FIXTURES / corruption.base / "expected.npz") as stored:
        gap = float(np.abs(stored["logits"] - outcome.logits).max())
    return outcome if gap < 1e-3 else Outcome("different", f"by {gap:g}")


def cut(rng: random.Random, folder: Path) -> str:
    """A file ends early."""
    file = _any_file(rng, folder)
    data = file.read_bytes()
    length = rng.choice([0, 1, 7, 8, 9, len(data) - 1, rng.randrange(len(data))])
    file.write_bytes(data[:length])
    return f"{file.name} at {length} of {len(data)}"


def lengthen(rng: random.Random, folder: Path) -> str:
    """A file has further bytes after its end."""
    file = _any_file(rng, folder)
    with file.open("ab") as opened:
        opened.write(rng.randbytes(rng.choice([1, 8, 4096])))
    return file.name


def header_bytes(rng: random.Random, folder: Path) -> str:
    """Bytes of a header, or of its length, are others."""
    file = _weights(rng, folder)
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    changed = []
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(8) if rng.random() < 0.2 else rng.randrange(8, end)
        data[place] = rng.randrange(256)
        changed.append(place)
    file.write_bytes(data)
    return f"{file.name} at {changed}"


def header_value(rng: random.Random, folder: Path) -> str:
    """A header's entry for a tensor is changed."""
    file = _weights(rng, folder)
    header, data = _opened(file)
    name = rng.choice(list(header))
    key = rng.choice(["dtype", "shape", "data_offsets"])
    value = rng.choice(
        [*POOL, "F32", "BF16", "F16", "I8", "F8_E4M3", "U8", [2**63, 2], [-1, 4]]
    )
    if value == header[name][key] or _means_the_same(header[name], key, value):
        return "nothing"
    header[name][key] = value
    _write(file, header, data)
    return f"{file.name}: {name}.{key} = {value!r:.60}"


def header_names(rng: random.Random, folder: Path) -> str:
    """A tensor has another name, or none."""
    file = _weights(rng, folder)
    header, data = _opened(file)
    name = rng.choice(list(header))
    entry = header.pop(name)
    other = rng.choice(
        [name + "x", name.replace("0", "7"), "", "a" * 5000, "\x00", "model..weight"]
    )
    header[other if other not in header else name + "y"] = entry
    _write(file, header, data)
    return f"{file.name}: {name} is {other!r:.40}"


def deep_header(rng: random.Random, folder: Path) -> str:
    """A header nests without end."""
    file = _weights(rng, folder)
    header = rng.choice([b"[", b'{"a":']) * rng.choice([500, 100_000])
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return file.name


def zeros(rng: random.Random, folder: Path) -> str:
    """The data of a file is zeros from somewhere on, as of a download cut short."""
    file = _weights(rng, folder)
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little") if rng.random() < 0.8 else 0
    data[start:] = bytes(len(data) - start)
    file.write_bytes(data)
    return f"{file.name} from {start}"


def not_numbers(rng: random.Random, folder: Path) -> str:
    """A tensor of floats has a NaN, or an infinity."""
    file = _weights(rng, folder)
    header, data = _opened(file)
    bits = {"F32": (4, [0x7FC00000, 0x7F800000]), "BF16": (2, [0x7FC0, 0xFF80])}
    names = [name for name, entry in header.items() if entry["dtype"] in bits]
    # Scales of NaN make a whole block of weights NaN, which is seen in the weights.
    name = rng.choice(names)
    size, values = bits[header[name]["dtype"]]
    start, end = header[name]["data_offsets"]
    place = rng.randrange(start, end, size)
    data[place : place + size] = rng.choice(values).to_bytes(size, "little")
    _write(file, header, data)
    return f"{file.name}: {name} at {place}"


def missing_file(rng: random.Random, folder: Path) -> str:
    """A file is not there, a directory, a link to nowhere, or a device."""
    file = _any_file(rng, folder)
    file.unlink()
    kind = rng.choice(["absent", "directory", "dangling", "device"])
    if kind == "directory":
        file.mkdir()
    elif kind == "dangling":
        file.symlink_to("nowhere")
    elif kind == "device":
        file.symlink_to(rng.choice(["/dev/null", "/dev/zero"]))
    return f"{file.name} {kind}"


def exchanged(rng: random.Random, folder: Path) -> str:
    """The weights belong to another model."""
    other = rng.choice([base for base in BASES if not _same_model(base, folder)])
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for file in (FIXTURES / other).glob("*.safetensors*"):
        shutil.copyfile(file, folder / file.name)
    return other


def index_value(rng: random.Random, folder: Path) -> str:
    """An index names other files, or is no index."""
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards == [SINGLE]:
        (folder / SINGLE).rename(folder / "model-00001-of-00001.safetensors")
        shards = ["model-00001-of-00001.safetensors"]
        names = list(_opened(folder / shards[0])[0])
        index: dict[str, Any] = {"weight_map": dict.fromkeys(names, shards[0])}
    else:
        index = json.loads((folder / INDEX).read_text())
    places = index["weight_map"]
    name = rng.choice(list(places))
    files = [
        "../x.safetensors",
        "x" * 5000 + ".safetensors",
        "a.bin",
        "\x00.safetensors",
    ]
    value = rng.choice([*POOL, *files])
    if rng.random() < 0.8:
        places[name] = value
    else:
        index["weight_map"] = value
    (folder / INDEX).write_text(json.dumps(index))
    return f"{name} in {value!r:.60}"


def tensor_twice(rng: random.Random, folder: Path) -> str:
    """A tensor is in two files; in the second, which no index names, it is zeros."""
    shards = sorted(folder.glob("*.safetensors"))
    if shards == [folder / SINGLE]:
        _split_in_two(folder)
        shards = sorted(folder.glob("*.safetensors"))
    header, _ = _opened(shards[0])
    name = rng.choice(list(header))
    start, end = header[name]["data_offsets"]
    other, data = _opened(shards[1])
    other[name] = {**header[name], "data_offsets": [len(data), len(data) + end - start]}
    _write(shards[1], other, data + bytes(end - start))
    return name


def _split_in_two(folder: Path) -> None:
    """Moves the last tensor to a file of its own."""
    header, data = _opened(folder / SINGLE)
    (folder / SINGLE).unlink()
    last = max(header, key=lambda name: header[name]["data_offsets"])
    entry = header.pop(last)
    start, end = entry["data_offsets"]
    first, second = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    _write(folder / first, header, data[:start])
    alone = {last: {**entry, "data_offsets": [0, end - start]}}
    _write(folder / second, alone, data[start:])
    places = dict.fromkeys(header, first) | {last: second}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def config_value(rng: random.Random, folder: Path) -> str:
    """A byte of config.json is another."""
    file = folder / "config.json"
    data = bytearray(file.read_bytes())
    place = rng.randrange(len(data))
    data[place] = rng.choice([rng.randrange(256), *b'0123456789{}[]",:-e.'])
    file.write_bytes(data)
    return f"at {place}: {bytes(data[max(0, place - 20) : place + 20])!r}"


DAMAGES: tuple[Callable[[random.Random, Path], str], ...] = (
    cut, lengthen, header_bytes, header_bytes, header_value, header_value, header_names,
    deep_header, zeros, not_numbers, missing_file, exchanged, index_value, tensor_twice,
    config_value,
)  # fmt: skip


def _any_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.iterdir()))


def _weights(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def _same_model(base: str, folder: Path) -> bool:
    theirs = json.loads((FIXTURES / base / "config.json").read_text())
    ours = json.loads((folder / "config.json").read_text())
    return theirs["model_type"] == ours["model_type"]


def _opened(file: Path) -> tuple[dict[str, Any], bytearray]:
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return header, bytearray(data[start:])


def _write(file: Path, header: dict[str, Any], data: bytearray) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _means_the_same(entry: dict[str, Any], key: str, value: Any) -> bool:
    """Two kinds of 16 bits, which nothing in a file tells apart."""
    halves = ("F16", "BF16")
    return key == "dtype" and value in halves and entry["dtype"] in halves


def main(seed: int, count: int) -> int:
    """Runs corruptions and prints what they led to; returns the number of defects."""
    counts: collections.Counter[str] = collections.Counter()
    rng = random.Random(seed)
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            corruption = corrupt(rng, Path(folder))
            outcome = try_corruption(corruption, Path(folder))
        counts[outcome.kind] += 1
        if outcome.kind in DEFECTS:
            print(f"{number} {corruption.base}: {corruption.change}", flush=True)
            print(f"    {outcome.kind}: {outcome.detail:.300}", flush=True)
    print(", ".join(f"{kind}: {found}" for kind, found in sorted(counts.items())))
    return sum(counts[kind] for kind in DEFECTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1200)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    raise SystemExit(main(options.seed, options.count) > 0)
