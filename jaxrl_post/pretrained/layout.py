"""How a parameter lies in a tensor on disk: data that works in both directions.

PyTorch stores a linear map as [out, in] with the heads merged into `out`; we hold
[in, heads, head_dim]. Every such difference is a permutation of dims followed by
merging neighbours, so it is written down once, over the logical axes of the parameter:
"(heads head_dim) embed". From that follow the shape on disk, the region of the tensor
that one shard of the parameter needs, and the way back.
"""

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["Fetch", "Index", "Join", "Layout", "Slot", "Weight", "slots"]

type Index = tuple[slice, ...]
type Fetch = Callable[[Index], np.ndarray]

# How the parameters that share a tensor follow one another in it.
Join = Literal["concat", "interleave"]


@dataclass(frozen=True)
class Weight:
    """Name and layout of a parameter in a checkpoint.

    Attributes:
        name: the tensor's name. `*` stands for the layer's number. `%` stands for an
            expert's: every expert has a tensor of its own, and the parameter's first
            logical axis is "experts".
        layout: the tensor's dims, slowest first, by logical axes of the parameter;
            axes in parentheses are merged into one dim, and "()" is a dim of size 1.
            With `%` in the name it names the axes after "experts".
        part: None where the tensor holds this parameter alone; else this parameter's
            place, from 0, among those that name the same tensor.
        join: how the parts follow one another: "concat" is one after the other;
            "interleave" is one element of each in turn, so that element i of part p is
            at i * parts + p.
        dim: of the tensor, along which the parts are joined; -1 is the last.
        also: names of the tensor in other releases of the family, with `*` and `%`.
            Reading takes the first that is there, saving always takes `name`.

    >>> Weight("model.layers.*.mlp.gate_up_proj.weight", "ffn embed", part=1).join
    'concat'
    """

    name: str
    layout: str
    part: int | None = None
    join: Join = "concat"
    dim: int = 0
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slot:
    """Which elements of one dim of a tensor a part has: start, start + step, ...

    Attributes:
        dim: of the tensor.
        start: the part's first element.
        step: from one element of the part to its next.
    """

    dim: int = 0
    start: int = 0
    step: int = 1

    def read(self, fetch: Fetch, region: Index) -> np.ndarray:
        """Reads a region of the part.

        The elements of an interleaved part lie apart; what is between them is fetched
        too, because files are read in whole rows.

        Args:
            fetch: reads a rectangular region of the tensor.
            region: of the part, every slice with both its bounds.
        """
        wanted = region[self.dim]
        length = wanted.stop - wanted.start
        first = self.start + wanted.start * self.step
        cover = slice(first, first + max(0, (length - 1) * self.step + 1))
        before, after = region[: self.dim], region[self.dim + 1 :]
        values = fetch((*before, cover, *after))
        return values[(slice(None),) * self.dim + (slice(None, None, self.step),)]

    def share(self, tensor: np.ndarray, size: int) -> np.ndarray:
        """Returns the view of the tensor that is the part, of `size` along `dim`."""
        own = slice(self.start, self.start + (size - 1) * self.step + 1, self.step)
        return tensor[(slice(None),) * self.dim + (own,)]


def slots(sizes: tuple[int, ...], join: Join, dim: int) -> tuple[Slot, ...]:
    """Returns the place of every part.

    Args:
        sizes: of the parts along `dim`, in their order.
        join: as `Weight.join`.
        dim: of the tensor, >= 0.

    Raises:
        ValueError: parts of different sizes cannot be interleaved.

    >>> slots((4, 2), "concat", 0)[1]
    Slot(dim=0, start=4, step=1)
    >>> slots((3, 3), "interleave", 2)[1]
    Slot(dim=2, start=1, step=2)
    """
    if join == "concat":
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return tuple(Slot(dim, start) for start in starts)
    if len(set(sizes)) != 1:
        raise ValueError(f"sizes: interleaved parts must have one size; got {sizes}")
    return tuple(Slot(dim, part, len(sizes)) for part in range(len(sizes)))


@dataclass(frozen=True)
class Layout:
    """A layout applied to one parameter; hashable, so it may be static in jit.

    Attributes:
        shape: of the parameter.
        groups: for every dim of the tensor, the parameter's dims that it merges.

    >>> layout = Layout.of("(heads head_dim) embed", ("embed", "heads", "head_dim"),
    ...                    (8, 4, 2))
    >>> layout.stored_shape
    (8, 8)
    >>> layout.groups
    ((1, 2), (0,))
    """

    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, text: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> "Layout":
        """Reads a layout such as "(heads head_dim) embed".

        Args:
            text: as `Weight.layout`; it names every axis once.
            axes: the parameter's logical axes.
            shape: the parameter's dimensions.

        Raises:
            ValueError: `text` and `axes` do not name the same axes.
        """
        names = [
            group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", text)
        ]
        if sorted(itertools.chain(*names)) != sorted(axes):
            raise ValueError(f"layout: {text!r} must name each axis of {axes} once")
        return cls(shape, tuple(tuple(map(axes.index, group)) for group in names))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(math.prod(self.shape[d] for d in group) for group in self.groups)

    @property
    def order(self) -> tuple[int, ...]:
        """The parameter's dims as they follow one another in the tensor."""
        return tuple(itertools.chain(*self.groups))

    def read(self, fetch: Fetch, index: Index) -> np.ndarray:
        """Reads one shard of the parameter.

        Only the region of the tensor that the shard needs is fetched. Where a dim is
        split that lies inside a merged one, that region has gaps and is fetched whole.

        Args:
            fetch: reads a rectangular region of the tensor.
            index: the shard, as slices of the parameter.

        Returns:
            The shard in the parameter's dims, a view of what was fetched.
        """
        bounds = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        region, split, inner = [], [], []
        for group in self.groups:
            if not group:
                region.append(slice(0, 1))
                continue
            first, *rest = group
            start, stop = bounds[first]
            width = math.prod(self.shape[dim] for dim in rest)
            region.append(slice(start * width, stop * width))
            split += [stop - start, *(self.shape[dim] for dim in rest)]
            inner += [slice(None), *(slice(*bounds[dim]) for dim in rest)]
        values = fetch(tuple(region)).reshape(split)[tuple(inner)]
        return values.transpose(np.argsort(self.order))

    def write(self, tensor: np.ndarray, shard: np.ndarray, index: Index) -> None:
        """Copies one shard of the parameter to its place in the tensor.

        Args:
            tensor: written to; a part of a larger one may be a view of it.
            shard: its dims in the tensor's `order`, as turned by the device that has
                it, which does so faster than NumPy.
            index: of the shard, as slices of the parameter.
        """
        # A view, since dims are only split here, whatever the strides.
        opened = tensor.reshape([self.shape[dim] for dim in self.order])
        opened[tuple(index[dim] for dim in self.order)] = shard
