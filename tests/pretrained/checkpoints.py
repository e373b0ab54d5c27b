"""Changes to checkpoints on disk, as somebody else's tool would have written them."""

import json

from safetensors.numpy import load_file, save_file


def edit_config(directory, **changes):
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(raw))


def edit_tensors(directory, edit):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
