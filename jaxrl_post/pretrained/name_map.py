"""Maps every parameter of a model to its tensors on disk."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxrl_post.models.spec import ParamSpec, is_spec
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.layout import Fetch, Index, Layout, Slot, Weight, slots
from jaxrl_post.pretrained.tensor_files import Tensor
from jaxrl_post.types import PyTree

__all__ = [
    "Entry",
    "entries_of",
    "matches",
    "paths",
    "present",
    "replaced_prefix",
    "some",
    "without_prefixes",
]

EXPERTS = "experts"


@dataclass(frozen=True)
class Entry:
    """The tensor on disk of a parameter, or of one expert of a parameter.

    Attributes:
        path: path of the parameter, such as "layers.0.attention.query".
        expert: the expert's number if every expert has its own tensor, otherwise None.
        name: name of the tensor.
        also: other names of the tensor, in the order in which they are tried.
        layout: layout of the parameter (without experts) in its part of the tensor.
        shape: shape of the whole tensor.
        slot: the parameter's part of the tensor.
    """

    path: str
    expert: int | None
    name: str
    also: tuple[str, ...]
    layout: Layout
    shape: tuple[int, ...]
    slot: Slot

    def read(self, fetch: Fetch, index: Index) -> np.ndarray:
        """Reads one shard; see `Layout.read`."""
        return self.layout.read(functools.partial(self.slot.read, fetch), index)

    def write(self, tensor: np.ndarray, shard: np.ndarray, index: Index) -> None:
        """Copies one shard into the whole tensor; see `Layout.write`."""
        size = self.layout.stored_shape[self.slot.dim]
        self.slot.write(
            tensor, size, lambda part: self.layout.write(part, shard, index)
        )


def paths(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves by path, such as "layers.0.attention.query".

    Files with such names do not depend on our Python classes.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {keystr(path): leaf for path, leaf in leaves}


def entries_of(weights: Mapping[str, Weight], specs: PyTree) -> list[Entry]:
    """Returns the entries of all parameters, in the order of the tree.

    Args:
        weights: the family's weights; those that `specs` lacks are left out.
        specs: tree of ParamSpecs.

    Raises:
        ValueError: the family's weights do not fit the specs.

    >>> weights = {"layers.*.up": Weight("h.*.experts.%.up", "ffn embed")}
    >>> spec = ParamSpec((2, 8, 4), ("experts", "embed", "ffn"))
    >>> [entry.name for entry in entries_of(weights, {"layers": [{"up": spec}]})]
    ['h.0.experts.0.up', 'h.0.experts.1.up']
    >>> entries_of(weights, {"layers": [{"up": spec}]})[0].shape
    (4, 8)
    """
    entries: list[Entry] = []
    shared: dict[str, list[tuple[int, Weight]]] = {}
    by_path = paths(specs)
    for path, spec in by_path.items():
        weight, layer = _weight(weights, path)
        for entry in _spelled_out(path, spec, weight, layer):
            shared.setdefault(entry.name, []).append((len(entries), weight))
            entries.append(entry)
    for sharers in shared.values():
        if len(sharers) > 1 or sharers[0][1].part is not None:
            _join(entries, sharers, by_path)
    return entries


def present(entries: Sequence[Entry], found: Collection[str]) -> list[Entry]:
    """Returns the entries, each with the first of its names that is in `found`."""

    def chosen(entry: Entry) -> str:
        names = (entry.name, *entry.also)
        return next((name for name in names if name in found), entry.name)

    return [
        replace(entry, name=chosen(entry)) if entry.also else entry for entry in entries
    ]


def replaced_prefix(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """Replaces a name's prefix by the first pair that matches it.

    >>> replaced_prefix("backbone.layers.0.norm", [("backbone.", "model.")])
    'model.layers.0.norm'
    """
    fits = ((old, new) for old, new in prefixes if name.startswith(old))
    old, new = next(fits, ("", ""))
    return new + name.removeprefix(old)


def without_prefixes(
    tensors: Mapping[str, Tensor], prefixes: Sequence[tuple[str, str]]
) -> dict[str, Tensor]:
    """Renames tensors of a model inside a larger one to the family's own names.

    Args:
        tensors: the checkpoint's tensors.
        prefixes: pairs of a prefix in the checkpoint and the family's prefix for it;
            the first pair that matches a name is used.

    Raises:
        CheckpointError: two tensors get one name.
    """
    renamed: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for name, tensor in tensors.items():
        ours = replaced_prefix(name, prefixes)
        if ours in renamed:
            raise CheckpointError(
                f"{tensor.file}: tensors {origin[ours]} and {name} both are {ours}; "
                f"remove the one that is not the language model's"
            )
        renamed[ours], origin[ours] = tensor, name
    return renamed


def matches(
    patterns: Sequence[str], name: str, num_layers: int, further_layers: int
) -> bool:
    """Whether a tensor's name fits one of the patterns.

    Args:
        patterns: patterns; `*` matches any text, `+` the number of a layer after the
            model's own layers, such as DeepSeek-V3's for multi-token prediction.
        name: name of the tensor.
        num_layers: number of the model's own layers.
        further_layers: number of layers after them.

    >>> matches(["model.layers.+.*"], "model.layers.2.eh_proj.weight", 2, 1)
    True
    >>> matches(["model.layers.+.*"], "model.layers.1.eh_proj.weight", 2, 1)
    False
    """
    further = range(num_layers, num_layers + further_layers)
    for pattern in patterns:
        text = re.escape(pattern).replace(r"\*", ".*").replace(r"\+", r"([0-9]{1,9})")
        fit = re.fullmatch(text, name)
        if fit and all(int(number) in further for number in fit.groups()):
            return True
    return False


def some(names: Collection[str]) -> str:
    """Lists up to four names and, if there are more, the number of all names."""
    shown = sorted(names)[:4]
    more = f", ... ({len(names)} in all)" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _weight(weights: Mapping[str, Weight], path: str) -> tuple[Weight, str]:
    """Returns the weight of a parameter and its layer's number ("" for no layer).

    A vision tower has numbered mergers, too.
    """
    number = re.search(r"(?<=\.)[0-9]+(?=\.)", path)
    layer = number[0] if number else ""
    pattern = f"{path[: number.start()]}*{path[number.end() :]}" if number else path
    if pattern not in weights:
        raise ValueError(f"weights: no entry for the parameter {pattern}")
    return weights[pattern], layer


def _spelled_out(path: str, spec: ParamSpec, weight: Weight, layer: str) -> list[Entry]:
    names = [name.replace("*", layer) for name in (weight.name, *weight.also)]
    one_each = "%" in weight.name
    if any(("%" in name) != one_each for name in names):
        raise ValueError(f"weights: all or none of {names} must have a %")
    axes, shape = spec.axes, spec.shape
    if one_each:
        if not axes or axes[0] != EXPERTS:
            raise ValueError(
                f"weights: {weight.name} numbers the experts, so the first axis of "
                f"{path} must be {EXPERTS!r}; got {axes}"
            )
        axes, shape = axes[1:], shape[1:]
    layout = Layout.of(weight.layout, axes, shape)
    experts = range(spec.shape[0]) if one_each else [None]
    made = []
    for expert in experts:
        name, *also = (name.replace("%", str(expert)) for name in names)
        made.append(
            Entry(path, expert, name, tuple(also), layout, layout.stored_shape, Slot())
        )
    return made


def _join(
    entries: list[Entry],
    sharers: list[tuple[int, Weight]],
    specs: Mapping[str, ParamSpec],
) -> None:
    """Gives the parameters that share a tensor their slots in it."""
    weights = [weight for _, weight in sharers]
    name, numbers = entries[sharers[0][0]].name, [weight.part for weight in weights]
    if set(numbers) != set(range(len(numbers))):
        raise ValueError(
            f"weights: the parts of {name} must be numbered from 0; got {numbers}"
        )
    alike = {(each.also, each.join, each.dim, each.groups) for each in weights}
    if len(alike) > 1:
        raise ValueError(
            f"weights: the parts of {name} must agree in also, join, dim and groups"
        )
    by_part = {weight.part: index for index, weight in sharers}
    order = [by_part[part] for part in range(len(sharers))]
    shapes = [entries[index].shape for index in order]
    dim = range(len(shapes[0]))[weights[0].dim]
    if len({(shape[:dim], shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ValueError(
            f"weights: the parts of {name} may differ in dim {dim} alone; got {shapes}"
        )
    sizes = tuple(shape[dim] for shape in shapes)
    whole = (*shapes[0][:dim], sum(sizes), *shapes[0][dim + 1 :])
    groups = 0
    if weights[0].groups:
        layer = entries[order[0]].path.split(".")[1]
        spec = specs[weights[0].groups.replace("*", layer)]
        groups = spec.shape[spec.axes.index("heads")]
    places = slots(sizes, weights[0].join, dim, groups)
    for index, slot in zip(order, places, strict=True):
        entries[index] = replace(entries[index], shape=whole, slot=slot)
