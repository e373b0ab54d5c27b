"""Writes a trace of some steps of a run, for xprof and Perfetto."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import jax

from jaxrl_post.config.run import RunConfig, profiled_steps
from jaxrl_post.sharding import processes

__all__ = ["Tracing"]

_log = logging.getLogger(__name__)


class Tracing:
    """Traces the steps that `--profile` names, in process 0.

    The phases of a step have the names of their metrics: rollout, reward, logprobs,
    train. A trace that cannot be written is a warning: the run continues.

    Args:
        config: of the run.
        folder: where the trace is written, below `plugins/profile`.
        done: the last step that was taken before.
    """

    def __init__(self, config: RunConfig, folder: Path, done: int) -> None:
        steps = profiled_steps(config.profile, config.steps)
        left = [step for step in steps if step > done]
        if len(left) < len(steps):
            _log.warning(
                "--profile %s: the run is at step %d already, and a step is traced "
                "while it is taken; %s traced",
                config.profile,
                done,
                f"steps from {left[0]} on are" if left else "none is",
            )
        self._steps = left if not processes.index() else []
        self._folder, self._traces = folder, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces the body if it takes a step that `--profile` names."""
        if number in self._steps and not self._traces:
            self._start()
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if self._traces and number == self._steps[-1]:
            self._stop()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Calls of Python would be most of the trace, and slow the step down.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )
            self._traces = True
        except Exception as error:
            self._fails(error)

    def _stop(self) -> None:
        if not self._traces:
            return
        self._traces = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            self._fails(error)

    def _fails(self, error: Exception) -> None:
        self._steps = []
        _log.warning(
            "--profile: no trace in %s: %s", self._folder, str(error) or repr(error)
        )
