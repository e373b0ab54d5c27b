"""Checks with torch and transformers what save_ours.py wrote.

    python tests/parity/check_saved.py FIXTURES SAVED

Every saved checkpoint must load without a missing or an unexpected tensor, hold the
fixture's tensors under the same names and bit for bit, and give the fixture's logits.
What a fixture holds quantized is saved dequantized; of a model that also sees, the part
that reads is saved. Runs under transformers 4 and 5, which read different keys of
config.json.
"""
# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from quantize import decode_fp8, decode_mxfp4
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

TOLERANCE = 1e-4

# Parts of the names of what sees.
SEEING = (
    "visual.", "vision_tower.", "multi_modal_projector.", "mm_projector.",
    "embed_vision.", "vision_embedder.",
)  # fmt: skip

# Where transformers 5 corrected 4, whose logits are then not compared.
CORRECTED = {
    "deepseek_v2_groups": "the scale of the scores lacked yarn's mscale",
    "deepseek_v2_lite": "the scale of the scores lacked yarn's mscale",
    "gemma": 'hidden_act "gelu" meant erf, not the tanh that Gemma was trained with',
    "qwen2_moe": "layer_types was not read",
}


def check(fixture: Path, saved: Path, dtype: torch.dtype | str) -> float:
    """Checks one checkpoint and returns the largest difference of its logits."""
    exact = check_tensors(fixture, saved, dtype)
    model, report = AutoModelForCausalLM.from_pretrained(
        saved,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    # As in make_fixtures.py.
    code = sys.modules[type(model).__module__]
    if hasattr(code, "torch_chunk_gated_delta_rule"):
        code.torch_chunk_gated_delta_rule = code.torch_recurrent_gated_delta_rule
    problems = {key: value for key, value in report.items() if value}
    assert not problems, f"{saved}: {problems}"
    major = int(transformers.__version__.split(".")[0])
    if not exact or (major < 5 and fixture.name in CORRECTED):
        return 0.0
    stored = np.load(fixture / "expected.npz")
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(stored["tokens"]).long()).logits
    gap = float(np.abs(logits.numpy() - stored["logits"]).max())
    assert gap < TOLERANCE, f"{saved}: logits differ by {gap}"
    return gap


def check_tensors(fixture: Path, saved: Path, dtype: torch.dtype | str) -> bool:
    """Compares names and values; returns whether no value was rounded.

    Only dequantized weights that were saved in a narrower dtype may be.
    """
    stored = read(fixture)
    expected = dequantize(text_only(stored, read_config(fixture)), read_config(fixture))
    found = read(saved)
    assert set(found) == set(expected), f"{saved}: {set(found) ^ set(expected)}"
    exact = True
    for name, tensor in expected.items():
        kept = dtype == "auto" and any(tensor is other for other in stored.values())
        if kept or dtype != "auto":
            wanted = tensor.dtype if kept else dtype
            if name.endswith(WIDE):
                wanted = torch.float32
            assert found[name].dtype == wanted, f"{saved}: {name} {found[name].dtype}"
        same = torch.equal(found[name], tensor.to(found[name].dtype))
        assert same, f"{saved}: {name} changed"
        exact = exact and torch.equal(found[name].float(), tensor.float())
    return exact


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Reads all tensors of a checkpoint."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for path in files for name, value in load_file(path).items()}


def read_config(folder: Path) -> dict:
    """Reads config.json."""
    return json.loads((folder / "config.json").read_text())


# Float32 in every model of ours.
WIDE = ("A_log", "dt_bias", "mixer.D")


def text_only(
    tensors: dict[str, torch.Tensor], config: dict
) -> dict[str, torch.Tensor]:
    """Returns a language model's tensors by the names that it has on its own."""
    if "vision_config" not in config:
        return {n: tensor for n, tensor in tensors.items() if not n.startswith("mtp.")}
    renamed = {}
    for name, tensor in tensors.items():
        if not any(part in name for part in SEEING):
            name = name.removeprefix("language_model.")
            name = name.replace("model.language_model.", "model.")
            renamed |= expert_by_expert(name, tensor, config)
    return renamed


def expert_by_expert(
    name: str, tensor: torch.Tensor, config: dict
) -> dict[str, torch.Tensor]:
    """Returns the matrices of the experts in a tensor that joins them, if it does."""
    stem, _, kind = name.partition(".experts.")
    if kind not in ("gate_up_proj", "down_proj"):
        return {name: tensor}
    hidden = config["text_config"]["hidden_size"]
    if tensor.shape[1 if kind == "gate_up_proj" else 2] == hidden:
        tensor = tensor.mT
    found = {}
    for expert, matrix in enumerate(tensor):
        own = f"{stem}.experts.{expert}"
        if kind == "down_proj":
            found[f"{own}.down_proj.weight"] = matrix
        else:
            gate, up = matrix.chunk(2)
            found |= {f"{own}.gate_proj.weight": gate, f"{own}.up_proj.weight": up}
    return found


def dequantize(
    tensors: dict[str, torch.Tensor], config: dict
) -> dict[str, torch.Tensor]:
    """Replaces codes and scales by the float32 weights that they stand for."""
    result = {}
    block = config.get("quantization_config", {}).get("weight_block_size", [None])[0]
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            codes = tensor.view(torch.uint8).numpy()
            scales = tensors[f"{name}_scale_inv"].numpy()
            result[name] = torch.from_numpy(decode_fp8(codes, scales, block))
        elif name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            scales = tensors[f"{name}_scales"].numpy()
            weight = decode_mxfp4(tensor.numpy(), scales).swapaxes(1, 2)
            result[name] = torch.from_numpy(np.ascontiguousarray(weight))
        elif not name.endswith(("_scale_inv", "_scales")):
            result[name] = tensor
    return result


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
