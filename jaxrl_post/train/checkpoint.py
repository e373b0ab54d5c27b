"""Checkpoints through Orbax: asynchronous, atomic, restorable onto another mesh."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from grain.checkpoint import CheckpointRestore, CheckpointSave

from jaxrl_post.models.name_map import paths
from jaxrl_post.train.state import TrainState
from jaxrl_post.types import PyTree

__all__ = ["CheckpointError", "Checkpoints", "abstract_state"]


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read."""


def abstract_state(shapes: TrainState, layout: TrainState) -> TrainState:
    """Shapes and dtypes with shardings: what `Checkpoints.restore` fills in.

    Args:
        shapes: from `jax.eval_shape`.
        layout: of the mesh to restore onto, which may be another than that of the run
            that saved.
    """
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        layout,
    )


class Checkpoints:
    """The checkpoints of one run.

    A checkpoint is written to a temporary directory and renamed when complete, so that
    one which is there is whole. The last `keep` are kept.

    Args:
        directory: where; made if missing.
        keep: how many to keep, >= 1.
        deadline_s: seconds to wait for one to be written.
    """

    def __init__(
        self, directory: Path, *, keep: int = 2, deadline_s: float = 600.0
    ) -> None:
        self.directory = directory
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=True,
                async_options=ocp.options.AsyncOptions(timeout_secs=int(deadline_s)),
            ),
        )

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, None where there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, the oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self,
        step: int,
        state: TrainState,
        iterator: grain.DatasetIterator,
        meta: Mapping[str, Any],
    ) -> None:
        """Starts to write a checkpoint; returns once the arrays are copied.

        Args:
            step: of the run; greater than that of the last one.
            state: may be donated as soon as this returns.
            iterator: of the training tasks.
            meta: JSON values.

        Raises:
            CheckpointError: this or the last save failed, on a full disk for example;
                the checkpoints before are whole.
        """
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(paths(state)),
                    data=CheckpointSave(iterator),
                    meta=ocp.args.JsonSave(dict(meta)),
                ),
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Waits until what `save` started is on the disk.

        Raises:
            CheckpointError: it failed.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(None, error) from error

    def restore(
        self, step: int, abstract: TrainState, iterator: grain.DatasetIterator
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint onto the shardings of `abstract`; winds the iterator.

        Raises:
            CheckpointError: it does not fit, or cannot be read.
        """
        wanted = paths(abstract)
        try:
            stored = self._stored(step)
            # Orbax would find a misfit halfway, with other arrays still on their way.
            if misfits := _misfits(stored, wanted):
                raise ValueError("; ".join(misfits[:4]))
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(wanted),
                    data=CheckpointRestore(iterator),
                    meta=ocp.args.JsonRestore(),
                ),
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"checkpoint: step {step} in {self.directory} cannot be restored: "
                f"{error}. Was it made with another model or optimizer? Use another "
                "run directory to start over"
            ) from error
        structure = jax.tree.structure(abstract)
        leaves = jax.tree.leaves(_ordered(restored["state"], wanted))
        return jax.tree.unflatten(structure, leaves), restored["meta"]

    def restore_params(
        self, step: int, shapes: PyTree, *, dtype: jnp.dtype | None = None
    ) -> PyTree:
        """Reads the parameters alone, onto one device.

        Args:
            step: of the checkpoint.
            shapes: tree of arrays or ShapeDtypeStructs; only their shapes count.
            dtype: of the result; None for that in which the run trained. float32 gives
                the master weights of a run that has some.

        Raises:
            CheckpointError: the parameters are others, or cannot be read.
        """
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        try:
            stored = self._stored(step)
            masters = any(name.startswith("master.") for name in stored)
            root = "master" if dtype == jnp.float32 and masters else "params"
            wanted = {
                name: jax.ShapeDtypeStruct(
                    leaf.shape, dtype or stored[name].dtype, sharding=where
                )
                for name, leaf in paths({root: shapes}).items()
            }
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        item=wanted,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(
                            wanted
                        ),
                        partial_restore=True,
                    )
                ),
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"checkpoint: the parameters of step {step} in {self.directory} cannot "
                f"be read: {error}. Are they those of another model?"
            ) from error
        leaves = _ordered(restored["state"], wanted)
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def close(self) -> None:
        """Waits for what is being written and releases the threads."""
        self.wait()
        self._manager.close()

    def _stored(self, step: int) -> Mapping[str, Any]:
        """Shape and dtype of every array of a checkpoint, by name."""
        folder = self.directory.absolute() / str(step) / "state"
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            # Typed for etils' Path, which pathlib's is in all that is asked of it.
            return handler.metadata(folder).tree  # type: ignore[arg-type]

    def _failed(self, step: int | None, error: Exception) -> CheckpointError:
        what = (
            "the last checkpoint" if step is None else f"the checkpoint of step {step}"
        )
        # Of the disk: Orbax counts a step from the moment its save begins.
        whole = [int(p.name) for p in self.directory.iterdir() if p.name.isdigit()]
        return CheckpointError(
            f"checkpoint: {what} could not be written to {self.directory}: {error}. "
            f"Step {max(whole, default=None)} is whole; free space there and run again "
            "to resume"
        )


def _misfits(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What tells the arrays of a checkpoint from those that are asked for."""
    found = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    found += [f"{name} is one too many" for name in stored.keys() - wanted.keys()]
    for name in wanted.keys() & stored.keys():
        have, want = stored[name], wanted[name]
        if (tuple(have.shape), have.dtype) != (want.shape, want.dtype):
            found.append(
                f"{name} is {have.dtype}{list(have.shape)}, not "
                f"{want.dtype}{list(want.shape)}"
            )
    return sorted(found)


def _ordered(found: Mapping[str, PyTree], wanted: Mapping[str, PyTree]) -> list[PyTree]:
    return [found[name] for name in wanted]
