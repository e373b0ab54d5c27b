"""Describes how a parameter is stored in a tensor on disk, for reading and writing.

PyTorch stores a linear map as [out, in] with the heads merged into `out`; our parameter
is [in, heads, head_dim]. Every such difference is a permutation of dims followed by a
merge of neighbouring dims. A string over the parameter's logical axes describes both:
"(heads head_dim) embed". The shape on disk, the region of the tensor that a shard of
the parameter needs, and the inverse for writing all follow from this string.
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

# How the parameters that share a tensor are ordered in it.
Join = Literal["concat", "interleave", "grouped"]


@dataclass(frozen=True)
class Weight:
    """Name and layout of a parameter in a checkpoint.

    Attributes:
        name: the tensor's name. `*` stands for the layer's number. `%` stands for the
            expert's number: every expert has its own tensor, and the parameter's first
            logical axis is "experts".
        layout: the tensor's dims, slowest first, as logical axes of the parameter;
            axes in parentheses are merged into one dim, and "()" is a dim of size 1.
            With `%` in the name, the layout leaves out the axis "experts".
        part: None if the tensor holds this parameter alone; otherwise this parameter's
            position, from 0, among the parameters that share the tensor.
        join: order of the parts' elements: "concat" stores one part after the other;
            "interleave" alternates the parts, so that element i of part p is at
            i * parts + p; "grouped" divides each part into as many blocks as `groups`
            says, and stores the first block of every part, then the second, ...
        dim: the tensor's dim along which the parts are joined; -1 is the last.
        also: names of the tensor in other releases of the family, with `*` and `%`.
            Loading takes the first name that exists; saving always uses `name`.
        groups: for "grouped", path of a parameter with as many heads as groups.

    >>> Weight("model.layers.*.mlp.gate_up_proj.weight", "ffn embed", part=1).join
    'concat'
    """

    name: str
    layout: str
    part: int | None = None
    join: Join = "concat"
    dim: int = 0
    also: tuple[str, ...] = ()
    groups: str = ""


@dataclass(frozen=True)
class Slot:
    """The elements of a tensor's dim that belong to a part, in blocks.

    Attributes:
        dim: the tensor's dim.
        start: index of the part's first element.
        block: elements that lie side by side; None for all.
        stride: distance of the first elements of two blocks.
    """

    dim: int = 0
    start: int = 0
    block: int | None = None
    stride: int = 0

    def read(self, fetch: Fetch, region: Index) -> np.ndarray:
        """Reads a region of the part.

        The other parts' elements between blocks are fetched too, because files are read
        in whole rows.

        Args:
            fetch: reads a rectangular region of the tensor.
            region: region of the part; every slice has both its bounds.
        """
        wanted = region[self.dim]
        places = self._places(wanted.start, wanted.stop)
        first = last = int(self._places(wanted.start, wanted.start + 1)[0])
        if len(places):
            last = int(places[-1]) + 1
        before, after = region[: self.dim], region[self.dim + 1 :]
        values = fetch((*before, slice(first, last), *after))
        if len(places) == last - first:
            return values
        return np.take(values, places - first, axis=self.dim)

    def write(
        self, tensor: np.ndarray, size: int, fill: Callable[[np.ndarray], None]
    ) -> None:
        """Lets `fill` write to the part of a tensor, `size` elements along `dim`."""
        before = (slice(None),) * self.dim
        places = self._places(0, size)
        own: slice | np.ndarray = places
        if self.block is None:
            own = slice(self.start, self.start + size)
        elif self.block == 1:
            own = slice(self.start, int(places[-1]) + 1, self.stride)
        part = tensor[(*before, own)]
        fill(part)
        if isinstance(own, np.ndarray):
            # Such a part is a copy.
            tensor[(*before, own)] = part

    def _places(self, start: int, stop: int) -> np.ndarray:
        """Indices in the tensor of a range of the part's elements."""
        numbers = np.arange(start, stop)
        if self.block is None:
            return self.start + numbers
        return self.start + numbers // self.block * self.stride + numbers % self.block


def slots(
    sizes: tuple[int, ...], join: Join, dim: int, groups: int = 0
) -> tuple[Slot, ...]:
    """Returns the slot of every part.

    Args:
        sizes: sizes of the parts along `dim`, in order.
        join: as `Weight.join`.
        dim: the tensor's dim, >= 0.
        groups: number of blocks of each part, if they are grouped.

    Raises:
        ValueError: parts of different sizes cannot be interleaved, nor parts grouped
            that the number of groups does not divide.

    >>> slots((4, 2), "concat", 0)[1]
    Slot(dim=0, start=4, block=None, stride=0)
    >>> slots((3, 3), "interleave", 2)[1]
    Slot(dim=2, start=1, block=1, stride=2)
    >>> slots((4, 8), "grouped", 0, groups=2)[1]
    Slot(dim=0, start=2, block=4, stride=6)
    """
    if join == "concat":
        starts = itertools.accumulate(sizes[:-1], initial=0)
        return tuple(Slot(dim, start) for start in starts)
    if join == "interleave":
        if len(set(sizes)) != 1:
            raise ValueError(
                f"sizes: interleaved parts must have one size; got {sizes}"
            )
        return tuple(Slot(dim, part, 1, len(sizes)) for part in range(len(sizes)))
    if not groups or any(size % groups for size in sizes):
        raise ValueError(f"sizes: {groups} groups must divide {sizes}")
    blocks = [size // groups for size in sizes]
    starts = itertools.accumulate(blocks[:-1], initial=0)
    return tuple(
        Slot(dim, start, block, sum(blocks))
        for start, block in zip(starts, blocks, strict=True)
    )


@dataclass(frozen=True)
class Layout:
    """Converts between one parameter and its tensor on disk.

    Attributes:
        shape: the parameter's shape.
        groups: for every dim of the tensor, the parameter's dims merged into it.

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
        """The parameter's dims in the order of the tensor."""
        return tuple(itertools.chain(*self.groups))

    def read(self, fetch: Fetch, index: Index) -> np.ndarray:
        """Reads one shard of the parameter.

        Only the region of the tensor that the shard needs is fetched. If the shard
        splits an inner dim of a merged one, this region includes unneeded elements.

        Args:
            fetch: reads a rectangular region of the tensor.
            index: the shard, as slices of the parameter.

        Returns:
            The shard in the parameter's dims, a view of the fetched region.
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
            tensor: the tensor to write into; may be a view of a larger tensor.
            shard: the shard with its dims in `order`. The caller transposes it on its
                device, which is faster than NumPy.
            index: the shard's position, as slices of the parameter.
        """
        # This reshape only splits dims, so it is a view for any strides.
        opened = tensor.reshape([self.shape[dim] for dim in self.order])
        opened[tuple(index[dim] for dim in self.order)] = shard
