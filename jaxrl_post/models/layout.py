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

import numpy as np

from jaxrl_post.types import Array

__all__ = ["Layout", "Weight"]

type Index = tuple[slice, ...]


@dataclass(frozen=True)
class Weight:
    """Name and layout of a parameter in a checkpoint.

    Attributes:
        name: the tensor's name; `*` stands for the layer's number.
        layout: the tensor's dims, slowest first, by logical axes of the parameter;
            axes in parentheses are merged into one dim.
    """

    name: str
    layout: str


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

    def read(self, fetch: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
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
        for first, *rest in self.groups:
            start, stop = bounds[first]
            width = math.prod(self.shape[dim] for dim in rest)
            region.append(slice(start * width, stop * width))
            split += [stop - start, *(self.shape[dim] for dim in rest)]
            inner += [slice(None), *(slice(*bounds[dim]) for dim in rest)]
        values = fetch(tuple(region)).reshape(split)[tuple(inner)]
        return values.transpose(np.argsort(self.order))

    def write(self, value: Array) -> Array:
        """Returns the whole parameter as the tensor that goes to disk."""
        return value.transpose(self.order).reshape(self.stored_shape)
