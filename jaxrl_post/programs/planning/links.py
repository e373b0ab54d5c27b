"""Links that a collective takes: inside of a node, or the network between nodes.

A ring over a group of devices passes into a node by as many networks as the node has
devices of the group, since every device has one of its own. An exchange, where each
device receives something else, takes each device's own network for all that comes from
other nodes.
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxrl_post.programs.planning.chips import Chip

__all__ = [
    "Groups",
    "Network",
    "groups_along",
    "network_of",
    "slowdown",
    "warning_of_tp",
]

# Devices that exchange data, by their places in a program's mesh, group by group.
type Groups = Sequence[Sequence[int]] | np.ndarray


@dataclass(frozen=True)
class Network:
    """The nodes of some devices, and how much longer a byte takes between them.

    Attributes:
        nodes: number of each device's node.
        slower: times that a byte takes longer from another node than over links.
    """

    nodes: tuple[int, ...]
    slower: float

    def ring(self, groups: Groups) -> float:
        """Times that a ring's collective takes longer than over links alone.

        Args:
            groups: places are places in `nodes`.

        >>> Network((0, 0, 1, 1), 8.0).ring([[0, 1, 2, 3]])
        4.0
        """
        return max(
            (self._ring(np.bincount(each)) for each in self._split(groups)), default=1.0
        )

    def exchange(self, groups: Groups) -> float:
        """Times that an all-to-all or a permutation takes longer than over links alone.

        Args:
            groups: as of `ring`.

        >>> Network((0, 0, 1, 1), 9.0).exchange([[0, 1, 2, 3]])
        6.0
        """
        return max(
            (self._exchange(np.bincount(each)) for each in self._split(groups)),
            default=1.0,
        )

    def _split(self, groups: Groups) -> list[np.ndarray]:
        """The nodes of each group; no group if no collective can be slower."""
        if self.slower <= 1.0:
            return []
        nodes = np.asarray(self.nodes)
        return [nodes[np.asarray(group)] for group in groups]

    def _ring(self, devices: np.ndarray) -> float:
        own = devices[devices > 0]
        return 1.0 if len(own) < 2 else max(1.0, self.slower / int(own.min()))

    def _exchange(self, devices: np.ndarray) -> float:
        own = devices[devices > 0]
        if len(own) < 2:
            return 1.0
        # The device that has fewest others on its node decides.
        size, least = int(own.sum()), int(own.min())
        return max(1.0, self.slower * (size - least) / (size - 1))


def network_of(mesh: Mesh, chip: Chip | None) -> Network:
    """The nodes of a mesh's devices, in the order in which a program numbers them.

    Args:
        mesh: its devices have numbers, node by node.
        chip: says how many devices a node has; None if links join all.
    """
    if chip is None or chip.slower <= 1.0:
        return Network((0,) * mesh.size, 1.0)
    nodes = tuple(device.id // chip.of_host for device in mesh.devices.flat)
    return Network(nodes, chip.slower)


def groups_along(sizes: Mapping[str, int], names: Collection[str]) -> np.ndarray:
    """The groups of devices of a collective over axes of a mesh.

    Args:
        sizes: of the mesh's axes, in its order.
        names: of the axes.

    Returns:
        int [groups, devices of a group], places in the flat mesh.

    >>> groups_along({"dp": 2, "tp": 2}, ["dp"]).tolist()
    [[0, 2], [1, 3]]
    """
    shape = tuple(sizes.values())
    along = [axis for axis, name in enumerate(sizes) if name in names]
    rest = [axis for axis in range(len(shape)) if axis not in along]
    places = np.arange(math.prod(shape)).reshape(shape).transpose(*rest, *along)
    return places.reshape(-1, math.prod(shape[axis] for axis in along))


@functools.cache
def slowdown(mesh: Mesh, names: tuple[str, ...], chip: Chip | None) -> float:
    """Times that a ring's collective over axes takes longer than over links alone.

    Args:
        mesh: as of `network_of`.
        names: of the axes.
        chip: as of `network_of`.
    """
    return network_of(mesh, chip).ring(groups_along(dict(mesh.shape), names))


def warning_of_tp(mesh: Mesh, chip: Chip | None, option: str) -> str | None:
    """Says why a mesh's tp should not span nodes; None if it does not.

    Args:
        mesh: on the devices.
        chip: says how many devices a node has; None if links join all.
        option: that gives the mesh, for the message.
    """
    factor = slowdown(mesh, ("tp",), chip)
    if chip is None or factor == 1.0:
        return None
    return (
        f"{option}: tp{mesh.shape['tp']} spans nodes of {chip.of_host} GPUs. Its sums, "
        "in each layer of each pass and of each decoding step, go over the network: "
        f"{factor:.3g} times as long as inside of a node, without the network's own "
        f"delay. Take a tp of both meshes that divides {chip.of_host}"
    )
