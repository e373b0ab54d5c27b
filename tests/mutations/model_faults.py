"""Faults of decoders: keys that layers share, heads of their own, tables per layer."""

from tests.mutations.fault import Fault

__all__ = ["MODELS"]

DECODER, SHARED = "models/decoder.py", "models/test_shared_keys.py"

MODELS = [
    Fault(
        "a layer reads the first keys of its kind",
        "pretrained/families/gemma4.py::_sources",
        "last = {kind: i for i, kind in enumerate(kinds[:first])}",
        "last = {kind: kinds.index(kind) for kind in kinds[:first]}",
        "pretrained/test_gemma4.py",
    ),
    Fault(
        "a layer that reads another's keys reads those of earlier calls alone",
        f"{DECODER}::_unrolled",
        "entry = entries[source]",
        "entry = entries[source] if kv_view is None else kv_view.layer(source)",
        SHARED,
    ),
    Fault(
        "a layer that reads another's keys has no window",
        f"{DECODER}::_Place.mixed",
        "config.window(index)",
        "None if config.layer(index).keys_of is not None else config.window(index)",
        SHARED,
    ),
    Fault(
        "a layer may read keys that have another window",
        "models/layer_spec.py::check_keys",
        '("window", "rotated", "heads")',
        '("rotated", "heads")',
        SHARED,
    ),
    Fault(
        "layers whose keys others read run as a loop",
        "models/stack.py::repetitions",
        "config.lends_keys(i) or i < num_levels",
        "i < num_levels",
        SHARED,
    ),
    Fault(
        "the factor of a layer's output has a gradient",
        "models/layer.py::_end",
        "jax.lax.stop_gradient(params.scale)",
        "params.scale",
        SHARED,
    ),
    Fault(
        "a layer's end reads the tables of the next layer",
        f"{DECODER}::_inputs",
        "inputs[:, layer]",
        "inputs[:, (layer + 1) % config.num_layers]",
        SHARED,
    ),
    Fault(
        "a router reads what the MLP reads",
        "models/layer.py::_experts",
        "unit_norm(config, hidden)",
        "x",
        SHARED,
    ),
    Fault(
        "values have no norm",
        "models/attention.py::keys_and_values",
        "unit_norm(config, value)",
        "value",
        SHARED,
    ),
    Fault(
        "values that are keys have the weight of the keys' norm",
        "models/attention.py::keys_and_values",
        "unit_norm(config, value)",
        "unit_norm(config, key if params.value is None else value)",
        SHARED,
    ),
    Fault(
        "all pairs of a head of a layer's own rotate",
        "models/rope.py::rope_tables",
        "plain[heads.rotated_pairs :] = 0.0",
        "pass",
        SHARED,
    ),
    Fault(
        "a layer's output has no factor",
        "models/layer.py::_end",
        "hidden * jax.lax.stop_gradient(params.scale)",
        "hidden",
        SHARED,
    ),
    Fault(
        "a layer's end reads the tables of the layer before it in exact mode",
        "models/exact/forward.py::_local",
        "inputs[:, index]",
        "inputs[:, index - 1]",
        SHARED,
    ),
]
