"""The sampler's layout of the parameters: where they lie, and what decoding costs."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.learner.model import Model
from jaxrl_post.models import DecoderParams, param_specs
from jaxrl_post.models.adapters.quantized import Quantizer
from jaxrl_post.models.matrix import is_matrix, matrices, part_axes
from jaxrl_post.models.spec import ParamSpec, abstract, is_spec
from jaxrl_post.programs.build.devices import split_devices
from jaxrl_post.rollout.weights import Published, Relayout, Transfer
from jaxrl_post.sampler import Engine
from jaxrl_post.sharding import (
    MeshError,
    Rules,
    dividing_axes,
    parse_mesh,
)
from jaxrl_post.sharding.reshard import plan_reshard
from jaxrl_post.types import Array, PyTree

__all__ = [
    "SamplerLayout",
    "bound",
    "gathered_bytes",
    "same_devices",
    "sampler_layout",
    "sampler_layouts",
]


@dataclass
class SamplerLayout:
    """Layout and dtype of the sampler's parameters, and how they are published.

    Attributes:
        mesh: the sampler's mesh, on the trainer's devices or on its own.
        dtype: dtype of the sampler's parameters.
        weights: quantises the trained matrices, or an adapter's base; None where the
            sampler has them as they are.
        codes: abstract arrays of what `weights` makes, on the trainer's mesh.
        trained: moves the trained parameters to `mesh`; None where the sampler uses the
            trainer's own arrays.
        frozen: moves an adapter's base, once; None without one.
    """

    mesh: Mesh
    dtype: jnp.dtype
    weights: Quantizer | None = None
    codes: PyTree = None
    trained: Relayout | Transfer | None = None
    frozen: Relayout | Transfer | None = None

    @property
    def copies(self) -> PyTree:
        """Abstract arrays of the sampler's own copies; None without copies."""
        moved = [each for each in (self.trained, self.frozen) if each is not None]
        if moved:
            return [each.targets for each in moved]
        return None if self.codes is None else list(matrices(self.codes).values())

    def read(self, model: Model) -> PyTree:
        """The parameters that decoding a token reads: arrays, or abstract arrays.

        Args:
            model: the trained model.
        """
        if self.trained is not None:
            return self.copies
        return model.base if self.codes is None else self.codes

    def gathered_a_token(self, model: Model) -> int:
        """Bytes of weights that a device receives for every decoded token.

        As `gathered_bytes`, of the layers: compilers take the gathers of embeddings and
        of the head out of the loop of decoding.

        Args:
            model: the trained model.
        """

        def without_tables(tree: PyTree) -> PyTree:
            if not isinstance(tree, DecoderParams):
                return tree
            rest = tree.per_layer and replace(tree.per_layer, embedding=None)
            return replace(tree, embedding=None, unembedding=None, per_layer=rest)

        return gathered_bytes(
            jax.tree.map(
                without_tables,
                self.read(model),
                is_leaf=lambda tree: isinstance(tree, DecoderParams),
            )
        )

    def publish(
        self, engine: Engine, model: Model, params: PyTree, version: int
    ) -> Published:
        """Binds a version of the parameters to the engine.

        Args:
            engine: on `mesh`.
            model: whose adapter's base is used, if it has one.
            params: the trained parameters.
            version: number of optimizer steps taken.
        """
        params, base, sent = self.moved(model, params)
        return Published(engine, bound(model, params, base), version, sent)

    def moved(self, model: Model, params: PyTree) -> tuple[PyTree, PyTree, int]:
        """Quantises and moves the parameters.

        Args:
            model: whose adapter's base is moved, if it has one.
            params: the trained parameters.

        Returns:
            The trained parameters and the frozen base (None without an adapter), as the
            sampler has them, and the bytes of the first that were sent over the links.
        """
        sent, adaptation = 0, model.adaptation
        if self.weights is not None and adaptation is None:
            params = self.weights(params)
        if self.trained is not None:
            params, sent = self.trained(params)
        if adaptation is None:
            return params, None, sent
        base = adaptation.base
        if self.weights is not None:
            base = self.weights(base)
        if self.frozen is not None:
            # Once a process: not counted, since a resumed run moves it again.
            base, _ = self.frozen(base)
        return params, base, sent


def bound(model: Model, params: PyTree, base: PyTree) -> DecoderParams[Any]:
    """The parameters for `forward`, of what `SamplerLayout.moved` returns; no copies.

    Args:
        model: the trained model.
        params: the trained parameters.
        base: of its adapter; None without one.
    """
    if model.adaptation is not None:
        model = replace(model, adaptation=replace(model.adaptation, base=base))
    return model.whole(params)


def sampler_layout(
    rollout: RolloutConfig,
    model: Model,
    *,
    rounds_inputs: bool = False,
    own: Mesh | None = None,
) -> SamplerLayout:
    """Reads `--rollout.mesh`, `--rollout.dtype` and `--rollout.weights`.

    Args:
        rollout: how samples are drawn.
        model: the trained model, on the trainer's mesh.
        rounds_inputs: whether the trainer computes in float8, so that products with
            float8 weights shall round their inputs as its own do.
        own: mesh of devices that the sampler has for itself; None for the trainer's.

    Raises:
        MeshError: the mesh does not fit the devices or the model.
    """
    dtype = jnp.dtype(rollout.dtype or model.dtype)
    weights = codes = None
    base = model.base
    if rollout.weights is not None:
        rounds_inputs = rounds_inputs and rollout.weights == "float8"
        weights = Quantizer(rollout.weights, rounds_inputs=rounds_inputs)
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), base
        )
        base = codes = weights.quantized(shapes)
    try:
        mesh = own or same_devices(rollout.mesh, model.mesh)
        if own is None and mesh is model.mesh and dtype == model.dtype:
            return SamplerLayout(mesh, dtype, weights, codes)
        trained, frozen = _targets(model, base, mesh, dtype)
    except MeshError as error:
        raise MeshError(f"--rollout.{error}") from error
    if own is not None:
        return SamplerLayout(
            mesh,
            dtype,
            weights,
            codes,
            Transfer(trained),
            None if frozen is None else Transfer(frozen, once=True),
        )
    size = rollout.publish_mib * 2**20
    return SamplerLayout(
        mesh,
        dtype,
        weights,
        codes,
        Relayout(trained, group_bytes=size),
        None if frozen is None else Relayout(frozen, group_bytes=size),
    )


def sampler_layouts(config: RLConfig, model: Model) -> list[SamplerLayout]:
    """Returns the layout of each sampler of a run; without `--samplers` there is one.

    Raises:
        MeshError: as `sampler_layout` and `split_devices`.
    """
    layout = functools.partial(
        sampler_layout, config.rollout, model, rounds_inputs=config.rounds_inputs
    )
    if not config.own_samplers:
        return [layout()]
    layouts = [layout(own=own) for own in split_devices(config).samplers]
    for each in layouts:
        # A version is quantised once, and its codes are copied to each.
        each.weights = layouts[0].weights
    return layouts


def gathered_bytes(params: PyTree) -> int:
    """Bytes of weights that a device receives to gather what pp, fsdp and cp split.

    Decoding gathers the dimensions that they split, alone or together with ep. What ep
    splits alone is not counted: for routed experts it is not gathered.

    Args:
        params: arrays or ShapeDtypeStructs, in the sampler's layout.
    """
    total = 0
    for leaf in jax.tree.leaves(params):
        if not isinstance(leaf.sharding, NamedSharding):
            continue
        whole = math.prod(leaf.sharding.shard_shape(leaf.shape))
        for entry in leaf.sharding.spec:
            names = (entry,) if isinstance(entry, str) else entry or ()
            if {"pp", "fsdp", "cp"} & set(names):
                whole *= math.prod(leaf.sharding.mesh.shape[name] for name in names)
        own = math.prod(leaf.sharding.shard_shape(leaf.shape))
        total += (whole - own) * leaf.dtype.itemsize
    return total


def same_devices(spec: str, mesh: Mesh) -> Mesh:
    """A mesh of another shape over a mesh's devices.

    Its tp is the trainer's tp, followed by parts of the trainer's fsdp, ep and dp. So a
    matrix that tp splits already stays where it is, and gets split further. Where no
    way between the two can be planned, the order is the trainer's, which XLA needs.

    Args:
        spec: axes of the mesh, such as "dp4,tp4"; "" for `mesh` itself.
        mesh: the trainer's mesh.

    Raises:
        MeshError: the axes do not fill the mesh's devices.
    """
    shape = parse_mesh(spec, mesh.size) if spec else dict(mesh.shape)
    if shape == dict(mesh.shape):
        return mesh
    grid, tp = np.asarray(mesh.devices), mesh.axis_names.index("tp")
    fastest = min(grid.shape[tp], shape["tp"])
    others, width = math.prod(grid.shape[:tp]), shape["tp"] // fastest
    sizes = tuple(shape[name] for name in mesh.axis_names)

    def shaped(devices: np.ndarray) -> Mesh:
        return Mesh(devices.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)

    if grid.shape[tp] % fastest == shape["tp"] % fastest == others % width == 0:
        # [rest, what tp takes of the other axes, tp that stays, tp that is given up]
        split = grid.reshape(others // width, width, fastest, -1)
        ordered = shaped(split.transpose(0, 3, 2, 1))
        whole = NamedSharding(mesh, P()), NamedSharding(ordered, P())
        if plan_reshard((1,), *whole) is not None:
            return ordered
    return shaped(grid)


def _targets(
    model: Model, whole: PyTree, mesh: Mesh, dtype: jnp.dtype
) -> tuple[PyTree, PyTree]:
    """(trained parameters, base of an adapter or None) as the sampler wants them.

    Args:
        model: the trained model.
        whole: its parameters, without an adapter; quantised, or as they are.
        mesh: the sampler's mesh.
        dtype: of the sampler's parameters.
    """

    def adapter(struct: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=struct.sharding)

    def base(spec: ParamSpec, leaf: Any) -> PyTree:
        if not is_matrix(leaf):
            return abstract(spec, dtype, mesh, model.rules)
        axes = part_axes(leaf, spec.axes)
        return jax.tree.map(lambda a, own: _part(a, own, mesh, model.rules), leaf, axes)

    if model.adaptation is None:
        return jax.tree.map(base, model.specs, whole, is_leaf=is_spec), None
    own = abstract(model.specs, dtype, mesh, model.rules)
    return (
        jax.tree.map(adapter, own, model.params),
        jax.tree.map(base, param_specs(model.config), whole, is_leaf=is_spec),
    )


def _part(
    array: Array | jax.ShapeDtypeStruct,
    axes: tuple[str | None, ...],
    mesh: Mesh,
    rules: Rules,
) -> jax.ShapeDtypeStruct:
    """The layout of a quantised matrix's codes or scales; uneven dims are whole."""
    entries = [
        dividing_axes(axis, size, mesh, rules) or None
        for size, axis in zip(array.shape, axes, strict=True)
    ]
    sharding = NamedSharding(mesh, P(*entries))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
