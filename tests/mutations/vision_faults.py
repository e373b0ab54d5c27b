"""Faults of pictures, of vision towers and of positions."""

from tests.mutations.fault import Fault

__all__ = ["VISION"]

TOWER = "models/vision/tower.py"
TESTS = "models/vision parity/test_vision.py"

VISION = [
    Fault(
        "padding has embeddings",
        f"{TOWER}::_merged",
        "jnp.where((tokens < pictures.counts[:, None])[..., None], found, 0)",
        "found",
        "models/vision",
    ),
    Fault(
        "pixels of padding matter",
        f"{TOWER}::_embedded",
        "jnp.where(valid[..., None], pixels, 0)",
        "pixels",
        "models/vision",
    ),
    Fault(
        "keys of padding are seen",
        "models/vision/attention.py::full_attention",
        "jnp.arange(patches, dtype=jnp.int32) < counts[:, None]",
        "jnp.arange(patches, dtype=jnp.int32) < patches + 0 * counts[:, None]",
        "models/vision",
    ),
    Fault(
        "a patch without keys has a gradient that is not finite",
        "models/vision/attention.py::_attend",
        "jnp.where(seen[:, None], scores * query.shape[-1] ** -0.5, NO_SCORE)",
        "jnp.where(seen[:, None], scores * query.shape[-1] ** -0.5, -jnp.inf)",
        "models/vision",
    ),
    Fault(
        "a window ends with its block of queries",
        "models/vision/attention.py::window_attention",
        "after = jnp.concatenate([parts[:, 1:], ends], axis=1)",
        "after = jnp.full_like(parts, filler)",
        "models/vision",
    ),
    Fault(
        "tokens stay in the order of windows",
        f"{TOWER}::_merged",
        "pictures.order is not None",
        "False",
        "parity/test_vision.py",
    ),
    Fault(
        "rows and columns of a head change places",
        f"{TOWER}::_rotation",
        "(pictures.rows, pictures.columns)",
        "(pictures.columns, pictures.rows)",
        "parity/test_vision.py",
    ),
    Fault(
        "every layer's output is a level",
        f"{TOWER}::tower",
        "params.levels[config.levels.index(index)]",
        "params.levels[0]",
        "parity/test_vision.py",
    ),
    Fault(
        "positions are interpolated between the centres of patches",
        "models/vision/pictures.py::_interpolation",
        "scaled / np.float32(max(size - 1, 1))",
        "scaled / np.float32(size)",
        TESTS,
    ),
    Fault(
        "the text after a picture continues from its rows alone",
        "pictures/positions.py::mrope_positions",
        "max(rows, columns)",
        "rows",
        TESTS,
    ),
    Fault(
        "patches are in the order of rows",
        "pictures/processor.py::PictureProcessor._blocks",
        "values.reshape(split).transpose(0, 3, 1, 4, 6, 2, 5)",
        "values.reshape(split).transpose(0, 1, 3, 4, 6, 2, 5)",
        "pictures parity/test_vision.py",
    ),
    Fault(
        "a link leads out of the folder of pictures",
        "pictures/source.py::_file",
        "not path.is_relative_to(folder)",
        "False",
        "pictures",
    ),
    Fault(
        "a bomb is decoded before its size is looked at",
        "pictures/reading.py::_check",
        "width * height > limits.pixels",
        "False",
        "pictures",
    ),
    Fault(
        "layers that add levels run as a loop",
        "models/stack.py::repetitions",
        "config.lends_keys(i) or i < num_levels",
        "config.lends_keys(i)",
        "parity/test_picture_rows.py",
    ),
    Fault(
        "pictures of one size have one number",
        "pictures/numbered.py::number",
        "digest.update(pixels.data)",
        "pass",
        "pictures/test_numbered.py",
    ),
    Fault(
        "a branch's positions begin as its parent's",
        "data/packing/rows.py::_fill",
        "rotations, rotation = rotary_positions(sequence.ids, rotation)",
        "rotations, _ = rotary_positions(sequence.ids, rotation)",
        "learner/test_pictures.py",
    ),
    Fault(
        "sampled tokens rotate by their place in the row",
        "sampler/batches.py::rows",
        "made.shifts[row] = request.shift",
        "made.shifts[row] = 0",
        "sampler/test_pictures.py",
    ),
    Fault(
        "a cut picture begins with its first block",
        "models/vision/rows.py::row_pictures",
        "found[spot.picture.first][0] * tokens + spot.block",
        "found[spot.picture.first][0] * tokens",
        "sampler/test_pictures.py",
    ),
    Fault(
        "a chunk's rotations are those of its own tokens",
        "sampler/batches.py::_pictures",
        "positions[len(before) :]",
        "positions[: chunk.size]",
        "sampler/test_pictures.py",
    ),
    Fault(
        "stored pictures keep their numbers",
        "tokens.py::Tokens.from_json",
        "stored[there] - first + picture.first",
        "stored[there]",
        "pictures/test_numbered.py",
    ),
    Fault(
        "a frozen tower is trained",
        "learner/model.py::with_frozen_tower",
        "model.config.vision is None",
        "True",
        "programs/test_vision.py",
    ),
]
