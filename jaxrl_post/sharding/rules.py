"""Sharding rules: a table of the mesh axes that split each logical axis."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEFAULT_RULES", "Rules"]

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Rules:
    """A table from logical axis to mesh axes; hashable, so it can be static in jit.

    Parameters and activations name each dimension by a logical axis. The rules say, in
    one place, over which axes of the mesh that dimension is split.

    >>> print(DEFAULT_RULES.replace(ffn=()).table())  # doctest: +ELLIPSIS
    logical axis  mesh axes
    batch         pp, dp, fsdp, ep
    ...
    ffn           -
    ...
    """

    entries: tuple[tuple[str, MeshAxes], ...]

    @classmethod
    def of(cls, mapping: Mapping[str, MeshAxes]) -> "Rules":
        """Makes rules from a dictionary."""
        return cls(tuple(mapping.items()))

    def mesh_axes(self, logical_axis: str | None) -> MeshAxes:
        """Returns the mesh axes of a logical axis; () keeps the dimension whole.

        Raises:
            ValueError: the logical axis is not in the table.
        """
        if logical_axis is None:
            return ()
        for name, axes in self.entries:
            if name == logical_axis:
                return axes
        known = ", ".join(name for name, _ in self.entries)
        raise ValueError(
            f"rules: no entry for the logical axis {logical_axis!r}; known: {known}"
        )

    def replace(self, **changes: MeshAxes) -> "Rules":
        """Returns a table in which the named entries are replaced or added."""
        return Rules.of({**dict(self.entries), **changes})

    def with_context_as_batch(self) -> "Rules":
        """Rules for tokens, or for sequences that are decoded: no row is cut.

        The context axes then split them as the axes of the batch do.

        >>> DEFAULT_RULES.with_context_as_batch().mesh_axes("batch")
        ('pp', 'dp', 'fsdp', 'ep', 'cp')
        """
        both = *self.mesh_axes("batch"), *self.mesh_axes("context")
        return self.replace(batch=tuple(dict.fromkeys(both)))

    def without(self, mesh_axis: str) -> "Rules":
        """Rules that split nothing over an axis of the mesh.

        >>> DEFAULT_RULES.without("dp").mesh_axes("batch")
        ('pp', 'fsdp', 'ep')
        """
        return Rules(
            tuple(
                (name, tuple(axis for axis in axes if axis != mesh_axis))
                for name, axes in self.entries
            )
        )

    def table(self) -> str:
        """Formats the table for printing."""
        rows = [("logical axis", "mesh axes")]
        rows += [(name, ", ".join(axes) or "-") for name, axes in self.entries]
        return "\n".join(f"{name:<13} {axes}" for name, axes in rows)


DEFAULT_RULES = Rules.of(
    {
        # Activations.
        "batch": ("pp", "dp", "fsdp", "ep"),
        "length": (),
        # The chunks of a row, in training (`sharding.Chunks`).
        "context": ("cp",),
        "hidden": (),
        # The hidden dim of what a stage passes to the next: each device sends a part.
        "passed": ("tp",),
        # Parameters, and activations with the same dimensions.
        "vocab": ("tp",),
        "embed": ("fsdp", "ep", "cp", "pp"),
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "head_dim": (),
        "ffn": ("tp",),
        "channels": ("tp",),
        "kernel": (),
        "norm": (),
        "value": (),
        "rank": (),
        # Experts. ep splits their number, so it cannot split their other dimensions.
        "experts": ("ep",),
        "expert_embed": ("fsdp", "cp", "pp"),
        "expert_ffn": ("tp",),
        "router": (),
        # A vision tower: its layers, its projection of a patch, its grid of positions.
        "tower_heads": ("tp",),
        "tower_ffn": ("tp",),
        "channel": (),
        "frame": (),
        "patch_row": (),
        "patch_column": (),
        "position": (),
    }
)
