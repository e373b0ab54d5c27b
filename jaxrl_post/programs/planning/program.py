"""A program of a step as a plan sees it: a jitted function, shapes, and its work."""

from dataclasses import dataclass, field
from typing import Any

from jax.sharding import Mesh

from jaxrl_post.programs.planning.chips import Work
from jaxrl_post.types import PyTree

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """A jitted function of a run, and the arrays on the device while it runs.

    Attributes:
        name: of the function, with what tells it from others of the same function.
        function: jitted as in a run.
        arguments: ShapeDtypeStructs with shardings.
        beside: ShapeDtypeStructs of other arrays that stay in memory.
        mesh: that is set around a call.
        static: static keyword arguments.
        calls: calls in a step; 0 if the plan has no step.
        work: of one call on one device; None if it is not counted.
        received: bytes that a call brings to a device from others; None to count them
            in the compiled program.
        unknown_trips: trips of a loop whose number depends on the data.
        overhead: seconds of a call that no work explains, such as launches.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    beside: PyTree
    mesh: Mesh
    static: dict[str, Any] = field(default_factory=dict)
    calls: int = 1
    work: Work | None = None
    received: float | None = None
    unknown_trips: int = 1
    overhead: float = 0.0
