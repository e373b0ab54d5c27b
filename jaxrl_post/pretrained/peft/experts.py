"""Adapters of routed experts in PEFT's format: its target_parameters.

In transformers 5 the routed experts of a layer are one module with two parameters,
gate_up_proj and down_proj. PEFT wraps the module once per adapted parameter
(gate_up_proj innermost), and stores

    lora_A.weight [experts * rank, in], with the expert as the slow index, and
    lora_B.weight [out, rank * experts], with the expert as the fast index.

Gate and up are one matrix there, with one A and their own rank (rank_pattern). Experts
without a gate have up_proj in its place.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.models.adapters.lora import Adapter, LoRAConfig, LoRAParams
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.matrix import EXPERTS, expert_dims, matrices, target_name
from jaxrl_post.models.params import text_specs
from jaxrl_post.models.spec import ParamSpec
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import family_of
from jaxrl_post.pretrained.layout import Layout, Slot
from jaxrl_post.pretrained.name_map import Entry
from jaxrl_post.types import Array

__all__ = [
    "expert_base",
    "expert_options",
    "expert_parameter",
    "expert_places",
    "of_one_rank",
    "read_expert_options",
]

GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"


def _parameters(config: ModelConfig) -> dict[str, str]:
    """The parameter in transformers that holds each target of routed experts."""
    if config.gated_mlp:
        return {"expert_gate": GATE_UP, "expert_up": GATE_UP, "expert_down": DOWN}
    return {"expert_up": UP, "expert_down": DOWN}


def expert_base(
    config: ModelConfig, stored: Entry, spec: ParamSpec, targets: tuple[str, ...]
) -> Entry:
    """Returns the entry of a routed experts' matrix among PEFT's modules.

    Args:
        config: the model's config.
        stored: the entry of the matrix, or of one expert, in the family's checkpoints.
        spec: spec of the matrix.
        targets: the adapter's targets; the module's name depends on them.
    """
    name, (experts, inputs, outputs) = target_name(stored.path), spec.shape
    slot = Slot()
    parameters = _parameters(config)
    if parameters[name] == GATE_UP:
        # PEFT concatenates gate and up, unless the checkpoint already joins them.
        start = 0 if name == "expert_gate" else outputs
        joined = stored.expert is None
        slot = replace(stored.slot, dim=0) if joined else Slot(0, start)
        outputs *= 2
    wraps = {parameters[target] for target in targets if target in parameters}
    inside = parameters[name] != DOWN and len(wraps) == 2
    module = _module(config, stored)
    return Entry(
        stored.path,
        None,
        f"{module}.base_layer" if inside else module,
        (),
        Layout(spec.shape, ((0,), (1,), (2,))),
        (experts, inputs, outputs),
        slot,
    )


def expert_parameter(config: ModelConfig, base: Entry) -> str:
    """Returns PEFT's name of the parameter that holds a routed experts' matrix."""
    return f"{_module(config, base)}.{_parameters(config)[target_name(base.path)]}"


def _module(config: ModelConfig, entry: Entry) -> str:
    """The name of the module of a layer's experts."""
    before, layers, after = entry.name.partition(".layers.")
    return f"{before}{layers}{after.split('.')[0]}.{_experts(config)}"


def _experts(config: ModelConfig) -> str:
    """The module's name in target_parameters and in patterns, after the layer's."""
    return family_of(config.model_type).experts_module


def expert_places(
    base: Entry, rank: int
) -> dict[str, tuple[Any, tuple[int, ...], Slot]]:
    """Returns merged dims, tensor shape and slot of A ("down") and B ("up").

    Args:
        base: the entry from `expert_base`.
        rank: rank of the adapter.
    """
    experts, inputs, outputs = base.shape
    return {
        "down": (((0, 2), (1,)), (experts * rank, inputs), Slot()),
        "up": (((2,), (1, 0)), (outputs, rank * experts), base.slot),
    }


def expert_options(
    config: ModelConfig, lora: LoRAConfig, by_target: Mapping[str, LoRAConfig]
) -> dict[str, Any]:
    """Returns PEFT's options for routed experts, empty if none are adapted.

    Args:
        config: the model's config.
        lora: the adapter's config.
        by_target: configs of experts' matrices whose rank differs from `lora`.
    """
    targets = [name for name in lora.targets if name in EXPERTS]
    if not targets:
        return {}
    parameters, module = _parameters(config), _experts(config)
    own = {
        f"experts.{parameters[name]}": by_target[name]
        for name in targets
        if name in by_target
    }
    return {
        "target_parameters": sorted({f"{module}.{parameters[n]}" for n in targets}),
        "rank_pattern": {name: each.rank for name, each in own.items()},
        "alpha_pattern": {name: each.alpha for name, each in own.items()},
    }


def read_expert_options(
    raw: Mapping[str, Any],
    lora: LoRAConfig,
    config: ModelConfig,
    modules: Sequence[str],
    file: Path,
) -> dict[str, LoRAConfig]:
    """Returns the adapted targets of routed experts, each with its rank and alpha.

    Args:
        raw: PEFT's options.
        lora: config with the default rank and alpha, used if no pattern matches.
        config: the base model's config.
        modules: names of all other modules that may be adapted.
        file: path of adapter_config.json, for messages.

    Raises:
        CheckpointError: the options adapt other parameters, adapt experts in some
            layers only, or give other modules a different rank or alpha.
    """
    _check_kinds(raw, file)
    names = _adapted(raw.get("target_parameters") or [], config, file)
    values = {}
    for option, default in (("rank_pattern", lora.rank), ("alpha_pattern", lora.alpha)):
        pattern = raw.get(option) or {}
        value = functools.partial(_value, pattern, default=default, file=file)
        own = {each: set(map(value, where)) for each, where in names.items()}
        differ = any(len(found) > 1 for found in own.values())
        if differ or set(map(value, modules)) - {default}:
            raise CheckpointError(
                f"{file}: the option {option}={pattern!r} is supported only for "
                "experts' own matrices, of all layers alike; merge the adapter into "
                "its base with PEFT and load the result"
            )
        values[option] = {each: only for each, [only] in own.items()}
    try:
        return {
            target: replace(
                lora,
                rank=values["rank_pattern"][parameter],
                alpha=float(values["alpha_pattern"][parameter]),
            )
            for target, parameter in _parameters(config).items()
            if parameter in names
        }
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _adapted(
    wanted: Sequence[str], config: ModelConfig, file: Path
) -> dict[str, list[str]]:
    """Returns the full names, in all layers, of every parameter in `wanted`."""
    layers = [
        path.split(".")[1]
        for path in matrices(text_specs(config))
        if target_name(path) == "expert_up"
    ]
    module, parameters = _experts(config), sorted(set(_parameters(config).values()))

    def meant(name: str) -> list[str]:
        return [each for each in wanted if f".{name}".endswith(f".{each}")]

    names, known, complete = {}, set(), True
    for parameter in parameters:
        where = [f"model.layers.{layer}.{module}.{parameter}" for layer in layers]
        found = [each for name in where for each in meant(name)]
        known.update(found)
        if found:
            names[parameter] = where
            complete = complete and all(map(meant, where))
    if not complete or known != set(wanted):
        raise CheckpointError(
            f"{file}: target_parameters must name "
            f"{' or '.join(f'{module}.{name}' for name in parameters)} of all layers "
            f"with experts of this {config.model_type}; got {wanted}"
        )
    return names


def _check_kinds(raw: Mapping[str, Any], file: Path) -> None:
    wanted = raw.get("target_parameters") or []
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    good = isinstance(wanted, list) and isinstance(ranks, dict)
    if not (
        good
        and isinstance(alphas, dict)
        and all(isinstance(name, str) for name in (*wanted, *ranks, *alphas))
        and all(type(rank) is int for rank in ranks.values())
        and all(isinstance(alpha, int | float) for alpha in alphas.values())
    ):
        raise CheckpointError(
            f"{file}: target_parameters must be a list of names, rank_pattern and "
            "alpha_pattern objects of integers and of numbers; got "
            f"{wanted!r}, {ranks!r} and {alphas!r}"
        )


def _value(pattern: Mapping[str, Any], name: str, *, default: Any, file: Path) -> Any:
    """Returns the value of the first key that matches, by PEFT's rule."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", name):
                return value
        except re.error as error:
            raise CheckpointError(
                f"{file}: the pattern {key!r} is no regular expression ({error})"
            ) from error
    return default


def of_one_rank(
    lora: LoRAConfig, by_target: Mapping[str, LoRAConfig], adapter: Adapter[Array]
) -> tuple[LoRAConfig, Adapter[Array]]:
    """Returns an equal adapter whose matrices all have the highest rank and its scale.

    Lower ranks are padded with zeros; B is multiplied where the scale differs.

    Args:
        lora: config of all targets that are not in `by_target`.
        by_target: configs of routed experts' matrices.
        adapter: adapter with these ranks.
    """
    rest = [lora] if any(name not in by_target for name in lora.targets) else []
    widest = max((*rest, *by_target.values()), key=lambda each: each.rank)
    lora = replace(lora, rank=widest.rank, alpha=widest.alpha)
    made = dict(adapter)
    for path, own in adapter.items():
        if not isinstance(own, LoRAParams):
            continue
        scale = by_target.get(target_name(path), rest[0] if rest else lora).scale
        up = own.up
        if not math.isclose(scale, lora.scale, rel_tol=1e-9):
            up = up * jnp.asarray(scale / lora.scale, up.dtype)
        down = _padded(own.down, own.down.ndim - 1, lora.rank)
        up = _padded(up, expert_dims(path), lora.rank)
        made[path] = own.replace(down=down, up=up)  # type: ignore[attr-defined]
    return lora, made


def _padded(array: Array, dim: int, size: int) -> Array:
    """Pads the end of a dim with zeros and keeps the array's sharding."""
    more = size - array.shape[dim]
    if not more:
        return array
    widths = [(0, more if each == dim else 0) for each in range(array.ndim)]
    return jax.device_put(jnp.pad(array, widths), array.sharding)
