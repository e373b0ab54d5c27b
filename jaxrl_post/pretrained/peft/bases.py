"""The modules that PEFT adapts, by the parameters here, and PEFT's names of them."""

from collections.abc import Sequence

from jaxrl_post.models.adapters.lora import adaptable
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.matrix import EXPERTS, expert_dims, matrices, target_name
from jaxrl_post.models.params import text_specs
from jaxrl_post.pretrained.families import family_of
from jaxrl_post.pretrained.name_map import Entry, entries_of
from jaxrl_post.pretrained.peft.experts import expert_base, expert_parameter

__all__ = ["WEIGHT", "bases", "module_names", "modules", "targets_of"]

WEIGHT = ".weight"
# PEFT's word for every linear module but the output; experts' matrices are parameters.
ALL_LINEAR = "all-linear"


def bases(config: ModelConfig, targets: tuple[str, ...]) -> dict[str, Entry]:
    """Returns the entries of all adaptable matrices; experts' names need `targets`."""
    specs = text_specs(config)
    entries = entries_of(family_of(config.model_type).weights, specs)
    places, found = {entry.path: entry for entry in entries}, matrices(specs)
    return {
        path: expert_base(config, places[path], spec, targets)
        if expert_dims(path)
        else places[path]
        for path, spec in found.items()
    }


def modules(config: ModelConfig) -> list[str]:
    """Returns the names of all adaptable modules; routed experts are parameters."""
    return [
        name
        for path, base in bases(config, ()).items()
        if not expert_dims(path)
        for name in _module_names(base)
    ]


def targets_of(config: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Converts names of matrices to the targets of `LoRAConfig`.

    A name is one of ours, such as query; the end of a module's path, as in PEFT's
    target_modules; the end of a parameter's path, as in its target_parameters; or
    "all-linear". A module that holds several of our matrices stands for all of them.

    Args:
        config: the model's config.
        names: as a user gives them; none for all matrices but the experts'.

    Raises:
        ValueError: the model has no matrix of a name, or only some layers have it.

    >>> config = ModelConfig("phi3", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> targets_of(config, ["qkv_proj", "output"])
    ('query', 'key', 'value', 'output')
    """
    known, found = adaptable(config), dict[str, None]()
    for name in names or [ALL_LINEAR]:
        if name == ALL_LINEAR:
            own = [each for each in known if each not in EXPERTS]
        else:
            own = [name] if name in known else _named(config, name)
        if not own:
            raise ValueError(
                f"lora: no layer of this {config.model_type} has a matrix {name}; "
                f"targets may be {', '.join(known)}, or, with PEFT's names, "
                f"{', '.join(module_names(config))}"
            )
        found |= dict.fromkeys(own)
    return tuple(found)


def _named(config: ModelConfig, name: str) -> list[str]:
    """Returns the targets of PEFT's name: of modules, else of experts' parameters."""
    every = bases(config, ())
    for experts in (0, 1):
        fits = {
            path: any(f".{each}".endswith(f".{name}") for each in _names(config, base))
            for path, base in every.items()
            if expert_dims(path) == experts
        }
        found = dict.fromkeys(target_name(path) for path, fit in fits.items() if fit)
        for path, fit in fits.items():
            if target_name(path) in found and not fit:
                raise ValueError(
                    f"lora: the target {name} leaves out "
                    f"{_names(config, every[path])[0]}, and "
                    "a matrix is adapted in all layers or in none; give the end of its "
                    f"name that is the same in all layers, or {target_name(path)}"
                )
        if found:
            return list(found)
    return []


def module_names(config: ModelConfig) -> list[str]:
    """Returns the last parts of PEFT's names of what can be adapted."""
    shown = dict[str, None]()
    for path, base in bases(config, ()).items():
        length = 2 if expert_dims(path) else 1
        shown[".".join(_names(config, base)[0].split(".")[-length:])] = None
    return [ALL_LINEAR, *shown]


def _names(config: ModelConfig, base: Entry) -> list[str]:
    """Returns PEFT's names of the module, or the parameter, that holds a matrix."""
    if expert_dims(base.path):
        return [expert_parameter(config, base)]
    return _module_names(base)


def _module_names(base: Entry) -> list[str]:
    return [name.removesuffix(WEIGHT) for name in (base.name, *base.also)]
