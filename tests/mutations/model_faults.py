"""Faults of decoders: keys that layers share, heads of their own, tables per layer."""

from tests.mutations.fault import Fault

__all__ = ["MODELS"]

DECODER, STACK = "models/decoder.py", "models/stack.py"
SHARED = "models/test_shared_keys.py"
STAGES = "sharding/stages.py"
FLOAT8 = "models/adapters/float8.py"

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
        f"{STACK}::_unrolled",
        "entry = flow.entries[source]",
        "entry = flow.entries[source] if kv_view is None else kv_view.layer(source)",
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
        f"{STACK}::repetitions",
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
    Fault(
        "an idle stage computes on with results of the last one",
        f"{STAGES}::through_stages.local.tick",
        "(round_ == IDLE) | ((stage == 0) & (round_ == 0))",
        "(stage == 0) & (round_ == 0)",
        "sharding/test_stages.py",
    ),
    Fault(
        "results of microbatches come back to other stages",
        f"{STAGES}::_ticks",
        "left[schedule.tick_of[-1, last, first + last]] = group",
        "left[schedule.tick_of[-1, last, first + last - 1]] = group",
        "sharding/test_stages.py",
    ),
    Fault(
        "a stage computes layers that follow each other",
        f"{STACK}::_over_stages",
        "a.reshape(schedule.rounds, stages, *a.shape[1:]).swapaxes(0, 1)",
        "a.reshape(stages, schedule.rounds, *a.shape[1:])",
        "models/test_stages.py",
    ),
    Fault(
        "routing of idle stages counts",
        f"{STACK}::_total",
        "told[stages, schedule.tick_of].sum(axis=2)",
        "told[stages, schedule.tick_of].sum(axis=2) + told[:, :1].sum()",
        "models/test_stages.py",
    ),
    Fault(
        "gradients of products in float8 have the range of e4m3",
        f"{FLOAT8}::_multiply_backward",
        'to_codes(scaled(change, scales), "float8_e5m2", (1,))',
        'to_codes(scaled(change, scales), "float8", (1,))',
        "models/test_float8.py",
    ),
    Fault(
        "products of experts in float8 forget the scales of tokens in a gradient",
        f"{FLOAT8}::_grouped_backward",
        "scaled(change, input_scales)",
        "change",
        "models/test_float8.py",
    ),
    Fault(
        "a sampler of float8 rounds weights alone while the trainer rounds inputs too",
        "programs/build/layouts.py::sampler_layout",
        "Quantizer(rollout.weights, rounds_inputs=rounds_inputs)",
        "Quantizer(rollout.weights)",
        "learner/test_float8.py",
    ),
    Fault(
        "a scale of float8 lets the largest value overflow",
        "models/adapters/eight_bits.py::to_codes",
        "(bits & 0x7FFFFF) > 0x600000",
        "(bits & 0x7FFFFF) > 0x700000",
        "models/test_float8.py",
    ),
]
