"""Training checkpoints with Orbax: asynchronous, atomic, resharded on restore."""

import contextlib
import errno
import logging
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxrl_post.files import (
    free_bytes,
    is_full,
    move,
    retried,
    settle,
    sync,
    waits,
)
from jaxrl_post.learner.manifest import find_damage, write_manifest
from jaxrl_post.learner.state import TrainState
from jaxrl_post.pretrained.directory import remove
from jaxrl_post.pretrained.name_map import paths
from jaxrl_post.sharding import processes
from jaxrl_post.types import PyTree

__all__ = ["CheckpointError", "Checkpoints", "abstract_state"]

_log = logging.getLogger(__name__)

_POLL_S = 0.02

# Orbax writes these after the manifest, and restores without them.
UNREAD = ("_CHECKPOINT_METADATA", "commit_success.txt")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def abstract_state(shapes: TrainState, layout: TrainState) -> TrainState:
    """Combines shapes and shardings into the target of `Checkpoints.restore`.

    Args:
        shapes: shapes and dtypes from `jax.eval_shape`.
        layout: shardings on the mesh to restore onto; the checkpoint's may differ.
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

    A checkpoint is written to a temporary directory with a list of its files and their
    checksums, and is renamed when complete, so that every checkpoint is whole at first.
    The list detects later damage. The last `keep` checkpoints are kept.

    Args:
        directory: directory of the checkpoints; made if missing.
        keep: number of checkpoints to keep, >= 1.
        deadline_s: seconds to wait for a checkpoint to be written.
        sole: whether no other process writes there; then unfinished checkpoints of
            killed processes are removed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        deadline_s: float = 600.0,
        sole: bool = False,
    ) -> None:
        self.directory = directory
        self._saving: int | None = None
        self._broken = False
        self._errors = _LoggedErrors()
        logging.getLogger("absl").addHandler(self._errors)
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=sole,
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=int(deadline_s),
                    post_finalization_callback=self._complete,
                ),
            ),
        )

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint, None if there is none."""
        return processes.agree("newest checkpoint", self._manager.latest_step())

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, the oldest first."""
        return sorted(self._manager.all_steps())

    def damage(self, step: int, *, sizes_only: bool = False) -> str | None:
        """Describes the damage of a checkpoint; None if it is whole.

        Args:
            step: the checkpoint's step.
            sizes_only: whether to look for missing and truncated files alone.
        """
        folder = self.directory / str(step)
        return find_damage(folder, ignored=UNREAD, sizes_only=sizes_only)

    def verify(self, step: int) -> None:
        """Raises if a checkpoint is damaged.

        Raises:
            CheckpointError: the checkpoint is damaged; the message names the file, and
                the checkpoints that are whole.
        """
        damage = self.damage(step)
        if damage is not None:
            whole = [str(each) for each in self.steps() if self.damage(each) is None]
            raise CheckpointError(
                f"checkpoint: step {step} in {self.directory} is damaged: {damage}. "
                f"Whole is: {', '.join(whole) or 'none'}"
            )

    def set_damaged_aside(self) -> None:
        """Renames damaged checkpoints that are newer than the newest whole one.

        They get the name `damaged-STEP`, and a warning gives the reason.

        Raises:
            CheckpointError: there are checkpoints, but none is whole; none is renamed.
        """
        # Process 0 renames, when all processes have read which checkpoints there are.
        processes.exchange("checkpoints", self.steps())
        if processes.index() == 0:
            self._set_damaged_aside()
        if processes.count() > 1:
            processes.exchange("damaged checkpoints are set aside", None)
            self._manager.reload()

    def _set_damaged_aside(self) -> None:
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            damage = self.damage(step)
            if damage is None:
                break
            damaged[step] = damage
        else:
            if damaged:
                told = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
                raise CheckpointError(
                    f"checkpoint: none in {self.directory} is whole ({told}). Restore "
                    "the files from a copy, or use another --run-dir to start over"
                )
        for step, why in damaged.items():
            aside = self._aside(step)
            move(self.directory / str(step), aside)
            _log.warning(
                "checkpoint: step %d in %s is damaged: %s. It is set aside as %s, and "
                "the run continues from the one before",
                step,
                self.directory,
                why,
                aside.name,
            )
        if damaged:
            self._manager.reload()

    def require_space(self, state: TrainState) -> None:
        """Raises if the disk is too full for the next checkpoint, and stays so.

        Args:
            state: the state to be saved.

        Raises:
            CheckpointError: the free space is smaller than the last checkpoint or, for
                the first checkpoint, than half of parameters, master weights and
                reference.
        """
        latest = self.latest()
        if latest is None:
            weights = jax.tree.leaves((state.params, state.master, state.reference))
            wanted = sum(leaf.nbytes for leaf in weights) // 2
        else:
            files = (self.directory / str(latest)).rglob("*")
            wanted = sum(file.stat().st_size for file in files if file.is_file())
        retried(
            lambda: self._check_space(wanted),
            self.directory,
            together=lambda more: all(processes.exchange("wait for room", more)),
        )

    def _check_space(self, wanted: int) -> None:
        spaces = processes.exchange("free disk", [wanted, free_bytes(self.directory)])
        wanted, free = spaces[0][0], min(free for _, free in spaces)
        if free < wanted:
            raise self._failed(
                f"one takes about {wanted / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are "
                "free"
            ) from OSError(errno.ENOSPC, "too little is free")

    def save(
        self,
        step: int,
        state: TrainState,
        iterator: grain.DatasetIterator,
        meta: Mapping[str, Any],
        *,
        whole: bool = False,
    ) -> None:
        """Starts to write a checkpoint; returns once the arrays are copied.

        A run of one process waits for room on a full disk (`files.patient`). A save
        that failed in the background is given up then, since its arrays are gone, and
        the next one is written in its place before this method returns.

        Args:
            step: the run's step, greater than the last checkpoint's.
            state: the state; may be donated once this method returns.
            iterator: iterator of the training tasks.
            meta: JSON values.
            whole: whether to return only when the checkpoint is on disk.

        Raises:
            CheckpointError: this or the last save failed, for example on a full disk;
                earlier checkpoints are whole.
        """
        whole = self._given_up(step) or whole
        self._saving = step
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(paths(state)),
            # Not grain's own handler: it writes one file a process, which another
            # number of processes could not restore.
            data=ocp.args.JsonSave(iterator.get_state()),
            meta=ocp.args.JsonSave(dict(meta)),
        )

        def begin() -> None:
            self.require_space(state)
            try:
                self._manager.save(step, args=args)
            except Exception as error:  # Orbax raises Exception itself.
                self._remove_unfinished()
                raise self._failed(_brief(error)) from error
            if whole:
                self.wait()

        # One of several processes cannot save again without the others.
        if processes.count() > 1:
            begin()
        else:
            retried(begin, self.directory / str(step))

    def _given_up(self, step: int) -> bool:
        """Whether the save before failed on a full disk, so that this one counts."""
        try:
            self.wait()
        except CheckpointError as error:
            if processes.count() > 1 or not (waits() and is_full(error)):
                raise
            _log.warning("%s. The checkpoint of step %d takes its place", error, step)
            return True
        return False

    def _remove_unfinished(self) -> None:
        """Removes what a save left that failed, which takes room from the next one."""
        if processes.count() == 1:
            for folder in self.directory.glob(f"{self._saving}.*"):
                remove(folder)

    def wait(self) -> None:
        """Waits until the checkpoint that `save` started is on disk.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            # With several processes, Orbax raises the error of one of them only when
            # all others have waited for it in vain, until the deadline of the save.
            while processes.count() > 1 and self._manager.is_saving_in_progress():
                self._errors.check()
                time.sleep(_POLL_S)
            self._manager.wait_until_finished()
            if self._saving is not None:
                sync(self.directory)
        except Exception as error:
            self._broken = True
            self._remove_unfinished()
            raise self._failed(_brief(error)) from error

    def restore(
        self, step: int, abstract: TrainState, iterator: grain.DatasetIterator
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restores a checkpoint with the shardings of `abstract`, and the iterator.

        Raises:
            CheckpointError: the checkpoint does not fit `abstract` or cannot be read.
        """
        wanted = paths(abstract)
        with self._reading(step):
            stored = self._stored(step)
        # Orbax would detect a mismatch only while it already reads other arrays.
        if misfits := _misfits(stored, wanted):
            raise CheckpointError(
                f"checkpoint: step {step} in {self.directory} cannot be restored: "
                f"{'; '.join(misfits[:4])}. Was it made with another model or "
                "optimizer? Use another run directory to start over"
            )
        with self._reading(step):
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(wanted),
                    data=ocp.args.JsonRestore(),
                    meta=ocp.args.JsonRestore(),
                ),
            )
        structure = jax.tree.structure(abstract)
        leaves = jax.tree.leaves(_ordered(restored["state"], wanted))
        iterator.set_state(restored["data"])
        return jax.tree.unflatten(structure, leaves), restored["meta"]

    def restore_params(
        self, step: int, shapes: PyTree, *, dtype: jnp.dtype | None = None
    ) -> PyTree:
        """Restores the parameters alone, onto one device.

        Args:
            step: the checkpoint's step.
            shapes: tree of arrays or ShapeDtypeStructs; only their shapes matter.
            dtype: dtype of the result; None for the run's compute dtype. float32 gives
                the master weights if the run has them.

        Raises:
            CheckpointError: the parameters do not fit `shapes` or cannot be read.
        """
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        with self._reading(step, hint=". Are they another model's?"):
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
        leaves = _ordered(restored["state"], wanted)
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def close(self) -> None:
        """Waits for an unfinished save and releases the threads."""
        logging.getLogger("absl").removeHandler(self._errors)
        if self._broken and processes.count() > 1:
            return  # The threads wait for other processes, which are about to end.
        self.wait()
        self._manager.close()

    @contextlib.contextmanager
    def _reading(self, step: int, *, hint: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises Exception itself.
            raise CheckpointError(
                f"checkpoint: step {step} in {self.directory} cannot be read: "
                f"{_brief(error)}{hint}"
            ) from error

    def _stored(self, step: int) -> Mapping[str, Any]:
        """Returns shape and dtype of every array of a checkpoint, by name."""
        folder = self.directory.absolute() / str(step) / "state"
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            # The annotation asks for etils' Path, but pathlib's works too.
            return handler.metadata(folder).tree  # type: ignore[arg-type]

    def _complete(self) -> None:
        """Writes the manifest once all files are written, before the rename."""
        (folder,) = self.directory.glob(f"{self._saving}.*")
        write_manifest(folder)
        # Orbax waits for the disk with arrays alone.
        settle(folder)

    def _aside(self, step: int) -> Path:
        """Returns an unused name for a damaged checkpoint."""
        aside = self.directory / f"damaged-{step}"
        for number in count(2):
            if not aside.exists():
                break
            aside = self.directory / f"damaged-{step}-{number}"
        return aside

    def _failed(self, why: str) -> CheckpointError:
        what = "a checkpoint"
        if self._saving is not None:
            what = f"the checkpoint of step {self._saving}"
        # Read from disk, because Orbax lists a step as soon as its save begins.
        whole = [int(p.name) for p in self.directory.iterdir() if p.name.isdigit()]
        kept = f"Step {max(whole)} is whole; free" if whole else "Free"
        return CheckpointError(
            f"checkpoint: {what} could not be written to {self.directory}: {why}. "
            f"{kept} space there and run again to resume"
        )


class _LoggedErrors(logging.Handler):
    """Keeps the first error that Orbax's threads log, to raise it in the main thread.

    A thread of Orbax that fails keeps its error for itself while it waits for the other
    processes, but logs it before.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._first: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and self._first is None:
            self._first = record.exc_info[1]

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self._first is not None:
            raise self._first


def _brief(error: Exception) -> str:
    """Shortens an error of Orbax to its first line, without the list of settings."""
    first = str(error).strip().partition("\n")[0]
    return first if len(first) <= 400 else f"{first[:400]} ..."


def _misfits(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Lists the differences between stored and wanted arrays."""
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
