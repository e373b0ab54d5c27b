"""Loads and saves adapters in PEFT's format: one JSON and one safetensors file.

PEFT adapts modules of a transformers model, so the tensors' names follow from the
checkpoint: the matrix model.layers.0.self_attn.q_proj.weight [out, in] has the adapter
base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [rank, in] and
lora_B.weight [out, rank]. Fully trained modules (modules_to_save), such as a reward
model's head "score", keep their own names.

https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from jaxrl_post.models.adapters.lora import (
    Adapter,
    LoRAConfig,
    adaptable,
    adapter_specs,
    check_adapter,
)
from jaxrl_post.models.config import Head, ModelConfig
from jaxrl_post.models.matrix import expert_dims, target_name
from jaxrl_post.models.spec import abstract, is_spec
from jaxrl_post.pretrained.directory import staged
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import family_of
from jaxrl_post.pretrained.layout import Layout, Slot
from jaxrl_post.pretrained.name_map import (
    Entry,
    paths,
    present,
    replaced_prefix,
    some,
    without_prefixes,
)
from jaxrl_post.pretrained.param_files import (
    check_tensors,
    load_parameter,
    write_parameters,
)
from jaxrl_post.pretrained.peft.bases import WEIGHT, bases, modules
from jaxrl_post.pretrained.peft.experts import (
    expert_options,
    expert_places,
    of_one_rank,
    read_expert_options,
)
from jaxrl_post.pretrained.peft.joined import joined
from jaxrl_post.pretrained.peft.modules import whole_entries, whole_of_modules
from jaxrl_post.pretrained.tensor_files import SINGLE_FILE, Tensor, read_json
from jaxrl_post.pretrained.weight_health import WeightHealth
from jaxrl_post.sharding import DEFAULT_RULES, Rules, named_shardings
from jaxrl_post.types import Array

__all__ = ["check_saves", "head_of", "load_adapter", "save_adapter"]

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT's suffix of every part of `LoRAParams`, after the module's name.
PARTS = {
    "down": ".lora_A.weight",
    "up": ".lora_B.weight",
    "magnitude": ".lora_magnitude_vector",
}

# PEFT's task type for a head, and the module of value and process heads.
TASKS = {
    "lm": "CAUSAL_LM", "lm+value": "CAUSAL_LM", "value": "SEQ_CLS",
    "process": "TOKEN_CLS",
}  # fmt: skip
HEAD = "score"
HEADS: Mapping[str, Head] = {"SEQ_CLS": "value", "TOKEN_CLS": "process"}

# In a whole model that sees, the modules of its text model, and a pattern of its tower.
SEEING = (("model.", "model.language_model."),)
TOWER = r"model\.visual\..*"

# Options that do not change the tensors' meaning: names, initialisation, training. The
# adapted modules are found from the tensors.
INERT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "target_modules", "task_type",
}  # fmt: skip
READ = {
    "alpha_pattern", "lora_alpha", "modules_to_save", "r", "rank_pattern",
    "target_parameters", "use_dora", "use_rslora",
}  # fmt: skip
# Any other option must be off; these values mean off.
OFF = (None, False, "none", [], {})
# Initialisations that leave the base weights unchanged; PiSSA and others change them.
BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


def head_of(path: Path) -> Head | None:
    """The head that an adapter's task needs; None for a language model's.

    Args:
        path: as `load_adapter`.
    """
    return HEADS.get(str(read_json(path / CONFIG_FILE).get("task_type")))


def load_adapter(
    path: str | os.PathLike[str],
    config: ModelConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> tuple[LoRAConfig, Adapter[Array]]:
    """Loads a LoRA, rsLoRA or DoRA adapter saved by PEFT or `save_adapter`.

    If a checkpoint joins several of our matrices in one, such as Phi-3's qkv_proj, each
    of our matrices gets the joined A and its own rows of B. The same holds for routed
    experts' gate and up. If their rank differs from the other matrices' rank, the lower
    rank is padded with zeros. The dropout rate is not read.

    Args:
        path: a directory with adapter_config.json and adapter_model.safetensors.
        config: the base model's config; for a process reward model, label 1 must mean
            "right".
        dtype: dtype of A and B; fully trained parameters are float32.
        mesh: mesh of the adapter; None puts it on JAX's default device.
        rules: mesh axes of every logical axis.

    Returns:
        (lora, adapter); the targets in `lora` are found from the tensors.

    Raises:
        CheckpointError: the directory does not hold an adapter of this model, or an
            option is not supported; the message names the problem.
    """
    directory = Path(path)
    config_file = directory / CONFIG_FILE
    if not config_file.is_file():
        raise CheckpointError(
            f"{config_file}: no such file; an adapter is a directory with "
            f"{CONFIG_FILE} and {TENSOR_FILE}"
        )
    lora, saved = _lora_config(config_file)
    by_target = read_expert_options(
        read_json(config_file), lora, config, modules(config), config_file
    )
    with _open(directory / TENSOR_FILE) as stored:
        family = family_of(config.model_type)
        tensors = without_prefixes(_without_prefix(stored), family.prefixes)
        lora = replace(
            lora,
            targets=_targets(config, lora, by_target, tensors, config_file),
            whole=whole_of_modules(config, saved, config_file),
        )
        specs = adapter_specs(config, lora)
        entries = _entries(config, lora, by_target)
        entries += whole_entries(config, lora.whole)
        entries = present(entries, tensors)
        check_tensors(tensors, entries, lambda name: False, config_file)
        health = WeightHealth()
        tensors = health.watched(tensors)
        by_path = {entry.path: entry for entry in entries}
        wanted = paths(specs)
        shardings = [None] * len(wanted)
        if mesh is not None:
            shardings = jax.tree.leaves(named_shardings(specs, mesh, rules))
        leaves = [
            load_parameter(
                tensors, [by_path[name]], sharding, jnp.dtype(spec.dtype(dtype))
            )
            for (name, spec), sharding in zip(wanted.items(), shardings, strict=True)
        ]
        # B is initialised with zeros, and so is a new head.
        health.warn(tensors, harmless=[n for n in tensors if "lora_A" not in n])
    structure = jax.tree.structure(specs, is_leaf=is_spec)
    return of_one_rank(lora, by_target, jax.tree.unflatten(structure, leaves))


def save_adapter(
    path: str | os.PathLike[str],
    config: ModelConfig,
    adapter: Adapter[Array],
    lora: LoRAConfig,
    base_model: str | None = None,
) -> None:
    """Saves an adapter that PEFT, and servers of PEFT adapters, can load.

    If a checkpoint joins matrices in one, such as Phi-3's qkv_proj, the file holds an
    equal adapter with a multiple of the rank. The same holds for routed experts' gate
    and up, which are one parameter in transformers 5. They need PEFT 0.19.1 or later,
    which warns that it ignores their rank_pattern but applies it. In some families with
    experts (DeepSeek, GLM, Qwen3.5), PEFT 0.21 under transformers 5 mistakes the names
    of MLPs for names of the experts and warns about missing keys: there, merge the
    adapter, or adapt only attention and routed experts.

    Saving is atomic: `path` is complete or does not exist. Of several processes all
    call it, and process 0 writes.

    Args:
        path: the directory to make; existing files are never overwritten.
        config: the base model's config.
        adapter: in any sharding; stored in its own dtype.
        lora: the adapter's config.
        base_model: name or directory of the base model, from which PEFT loads it.

    Raises:
        CheckpointError: `path` is not empty, DoRA adapts only some parts of a joined
            matrix, or a fully trained parameter has no tensor of its own in the
            family's checkpoints.
        ValueError: the adapter does not fit `config` and `lora`.

    >>> import tempfile
    >>> from jaxrl_post.models import initialize, param_specs
    >>> from jaxrl_post.models.adapters.lora import initialize_adapter
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> params = initialize(jax.random.key(0), param_specs(config))
    >>> lora = LoRAConfig(rank=4, targets=("query", "value"))
    >>> adapter = initialize_adapter(jax.random.key(1), params, config, lora)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_adapter(f"{folder}/tiny", config, adapter, lora)
    ...     same_lora, same_adapter = load_adapter(f"{folder}/tiny", config)
    >>> lora == same_lora
    True
    """
    check_adapter(adapter, config, lora)
    if config.head == "lm+value" and "value_head" in adapter:
        raise CheckpointError(
            "adapter: PEFT has no place for a value head on a language model; save the "
            "adapter of the policy, without its value head"
        )
    # With all targets, every matrix has its own name.
    held = bases(config, adaptable(config))
    lora, by_target, adapter = joined(config, held, adapter, lora)
    entries = _entries(config, lora, by_target)
    whole = whole_entries(config, lora.whole)
    saved = sorted({entry.name.rpartition(".")[0] for entry in whole})
    options = _options(config, lora, entries, saved, base_model)
    options |= expert_options(config, lora, by_target)
    if config.vision is not None:
        # Matrices of a tower have the names of the text model's.
        options["exclude_modules"] = TOWER
    text = json.dumps(options, indent=2, sort_keys=True) + "\n"
    modules = family_of(config.model_type).modules
    if config.vision is not None:
        modules = SEEING
    named = [
        replace(each, name=PREFIX + replaced_prefix(each.name, modules))
        for each in (*entries, *whole)
    ]
    values = paths(adapter)
    with staged(path) as staging:
        total = sum(value.nbytes for value in values.values())
        write_parameters(staging, named, values, total, {})
        if staging is not None:
            (staging / SINGLE_FILE).rename(staging / TENSOR_FILE)
            (staging / CONFIG_FILE).write_text(text, encoding="utf-8")


def _options(
    config: ModelConfig,
    lora: LoRAConfig,
    entries: Sequence[Entry],
    saved: Sequence[str],
    base_model: str | None,
) -> dict[str, Any]:
    """Returns the contents of adapter_config.json except options of routed experts.

    Args:
        config: the base model's config.
        lora: the config with the file's rank and targets.
        entries: entries of the adapted matrices.
        saved: fully trained modules.
        base_model: as in `save_adapter`.
    """
    # For a classifier PEFT needs the head in the file, even if modules_to_save lacks
    # it.
    task = TASKS[config.head] if config.predicts_tokens or HEAD in saved else None
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "target_modules": sorted(
            {_module(config, entry) for entry in entries if not _of_experts(entry)}
        ),
        "bias": "none",
        "lora_dropout": lora.dropout,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": list(saved) or None,
    }


def check_saves(config: ModelConfig, lora: LoRAConfig) -> None:
    """Raises the errors of `save_adapter` from the configs alone, without arrays.

    A language model's value head is not checked, since it is never saved.

    Raises:
        CheckpointError: as `save_adapter`.
        ValueError: as `adapter_specs`.
    """
    specs = adapter_specs(config, lora)
    held = bases(config, adaptable(config))
    jax.eval_shape(
        lambda adapter: joined(config, held, adapter, lora)[2],
        abstract(specs, jnp.float32),
    )
    if config.head != "lm+value":
        whole_entries(config, lora.whole)


def _lora_config(file: Path) -> tuple[LoRAConfig, list[str]]:
    """Reads the options without targets, and the names of fully trained modules.

    Refuses unsupported options.
    """
    raw = read_json(file)
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{file}: peft_type must be 'LORA'; got {raw.get('peft_type')!r}"
        )
    beginning = raw.pop("init_lora_weights", True)
    if beginning not in BEGINNINGS:
        raise CheckpointError(
            f"{file}: init_lora_weights={beginning!r} changes the base model too; "
            "convert the adapter to a plain LoRA with PEFT first"
        )
    for name in sorted(raw.keys() - INERT - READ):
        if raw[name] not in OFF:
            raise CheckpointError(
                f"{file}: the option {name}={raw[name]!r} is not supported; merge the "
                "adapter into its base with PEFT and load the result"
            )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise CheckpointError(
            f"{file}: r must be an integer and lora_alpha a number; got {rank!r} and "
            f"{alpha!r}"
        )
    saved = raw.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(m, str) for m in saved):
        raise CheckpointError(
            f"{file}: modules_to_save must be a list of names; got {saved!r}"
        )
    try:
        lora = LoRAConfig(
            rank=rank,
            alpha=float(alpha),
            rank_stabilized=raw.get("use_rslora") is True,
            dora=raw.get("use_dora") is True,
        )
        return lora, saved
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _targets(
    config: ModelConfig,
    lora: LoRAConfig,
    experts: Collection[str],
    tensors: Mapping[str, Tensor],
    config_file: Path,
) -> tuple[str, ...]:
    """Returns the targets whose A is in the file; `check_tensors` checks the rest.

    Targets of routed experts come from the options.
    """
    every = replace(lora, targets=adaptable(config, dora=True))
    found = {
        target_name(entry.path.rpartition(".")[0])
        for entry in present(_entries(config, every, {}), tensors)
        if entry.name in tensors
    } | set(experts)
    if not found:
        raise CheckpointError(
            f"{config_file.parent}: no tensor changes a matrix that is adapted here "
            f"({', '.join(every.targets)} of {config.model_type}); got "
            f"{some(tensors.keys()) or 'an empty file'}"
        )
    return tuple(name for name in adaptable(config) if name in found)


def _entries(
    config: ModelConfig, lora: LoRAConfig, by_target: Mapping[str, LoRAConfig]
) -> list[Entry]:
    """Returns the entries of all A, B and magnitudes, without PEFT's prefix.

    The rank comes from `by_target`, or from `lora` for other targets.
    """
    held = bases(config, lora.targets)
    of_rank = {
        rank: adapter_specs(config, replace(lora, rank=rank, whole=()))
        for rank in {each.rank for each in (lora, *by_target.values())}
    }
    entries = []
    for path in of_rank[lora.rank]:
        base, rank = held[path], by_target.get(target_name(path), lora).rank
        for part, (groups, shape, slot) in _places(base, rank).items():
            spec = getattr(of_rank[rank][path], part)
            if spec is None:
                continue
            names = (base.name, *base.also)
            name, *also = (n.removesuffix(WEIGHT) + PARTS[part] for n in names)
            layout = Layout(spec.shape, groups)
            entries.append(
                Entry(f"{path}.{part}", None, name, tuple(also), layout, shape, slot)
            )
    return entries


def _places(base: Entry, rank: int) -> dict[str, tuple[Any, tuple[int, ...], Slot]]:
    """Returns merged dims, tensor shape and slot of A, B and the magnitude.

    They follow from the base matrix, which is [out, in] in files and starts with the
    input dims in our parameters.
    """
    if expert_dims(base.path):
        return expert_places(base, rank)
    out, into = base.layout.groups
    inputs, (rows, columns) = len(into), base.shape
    outer = tuple(dim - inputs for dim in out)
    return {
        "down": (((inputs,), into), (rank, columns), Slot()),
        "up": ((tuple(dim + 1 for dim in outer), (0,)), (rows, rank), base.slot),
        "magnitude": ((outer,), (rows,), base.slot),
    }


def _of_experts(entry: Entry) -> bool:
    return expert_dims(entry.path.rpartition(".")[0]) == 1


def _module(config: ModelConfig, entry: Entry) -> str:
    """Returns the end of a module's path, by which PEFT finds the module.

    In a model with experts it includes the MLP's name, because the experts have
    projections of the same name.
    """
    module = entry.name.partition(".lora_")[0].split(".")
    length = 1 if config.experts is None or ".attention." in entry.path else 2
    return ".".join(module[-length:])


def _without_prefix(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}


@contextmanager
def _open(path: Path) -> Iterator[dict[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; adapters in pickle files (.bin) can run code and "
            "are not read: save them again with PEFT, which writes safetensors"
        )
    try:
        handle = safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: truncated or damaged ({error}); fetch it again"
        ) from error
    with handle as opened:
        tensors = {}
        for name in opened.keys():  # noqa: SIM118 (not a mapping)
            view = opened.get_slice(name)
            shape = tuple(view.get_shape())
            tensors[name] = Tensor(path, shape, view.get_dtype(), view.__getitem__)
        yield tensors
