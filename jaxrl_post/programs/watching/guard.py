"""Watches a run: holds its steps against rules, tells alarms, and acts on them."""

import difflib
import json
import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from jaxrl_post.config.checks import read_webhook
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, WatchConfig, flattened
from jaxrl_post.files import replace_file
from jaxrl_post.programs.watching.exposition import Exposition, serving_metrics
from jaxrl_post.programs.watching.host import host_metrics
from jaxrl_post.programs.watching.webhook import Webhook
from jaxrl_post.records import notation
from jaxrl_post.records.alarms import AlarmLog
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.metric_table import row_of, rows
from jaxrl_post.watch.alarms import NOT_FINITE, RAISED, Alarm, RunWatch
from jaxrl_post.watch.bounds import RuleError, pattern_of
from jaxrl_post.watch.rule import Rule, default_rules, read_rules

__all__ = ["Acting", "AlarmError", "Guard", "acting_of", "open_watch"]

_LOGGER = logging.getLogger(__name__)

# Alarms of one rule that are told on the console; alarms.jsonl has all of them.
TOLD = 3
# Rows of metrics.jsonl that a resumed run follows: of its beginning, and of its end.
FIRST, LAST = 300, 1000
# Alarms of a run whose checkpoint and batch are kept.
KEPT = 3


class AlarmError(Exception):
    """A rule ended the run, which is saved and can be resumed."""


class Acting(NamedTuple):
    """An alarm that a run acts on, as JSON values that all processes are told.

    Attributes:
        rule: name of the rule.
        action: "keep", "pause" or "stop".
        told: the alarm in words.
    """

    rule: str
    action: str
    told: str

    @property
    def stops(self) -> bool:
        """Whether the run ends."""
        return self.action == "stop"

    @property
    def pauses(self) -> bool:
        """Whether the run waits for a person."""
        return self.action == "pause"

    def ended(self, step: int, path: Path) -> str:
        """Says why the run ended, and how to continue it."""
        return (
            f"the run ended at step {step}, by the rule {self.told}\n"
            f"It is saved in {path}; the same command resumes it, with --watch.off "
            f"{self.rule} without the rule"
        )


def acting_of(alarm: Alarm) -> Acting:
    """Says how a run acts on an alarm."""
    return Acting(alarm.rule.name, alarm.rule.action, alarm.told())


def open_watch(config: RunConfig) -> RunWatch:
    """Reads the rules of a run and checks that they name metrics.

    Args:
        config: of the run.

    Raises:
        ConfigError: the rules cannot be read or used, or name no metric of any run.
    """
    options = flattened(asdict(config))
    try:
        found = read_rules(config.watch.rules, config.watch.off)
        if config.watch.rules is not None:
            _check_metrics(found)
            _check_named(found, options)
        return RunWatch(found, options)
    except RuleError as error:
        raise ConfigError(f"--watch.rules: {error}") from error


def _check_metrics(found: Iterable[Rule]) -> None:
    """Refuses conditions on metrics that metrics.toml does not describe."""
    for rule in found:
        for condition in rule.conditions:
            names = [] if condition.function else [condition.metric]
            for name in [*names, *([condition.per] if condition.per else [])]:
                if not _is_known(name):
                    near = difflib.get_close_matches(name, [*rows()], n=3, cutoff=0.5)
                    hint = f"did you mean {' or '.join(near)}? " if near else ""
                    raise RuleError(
                        f"rule {rule.name}: there is no metric {name!r}; {hint}"
                        "docs/reference/metrics.md has all of them"
                    )


def _check_named(found: Iterable[Rule], own: Mapping[str, Any]) -> None:
    """Refuses bounds and `options` that name an option which no program has."""
    known = {**flattened(asdict(RLConfig())), **own}
    for rule in found:
        for name in (*(each.bound for each in rule.conditions), *rule.options):
            if isinstance(name, str) and name not in known:
                near = difflib.get_close_matches(name, [*known], n=3, cutoff=0.5)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise RuleError(
                    f"rule {rule.name}: there is no option {name!r}, which it "
                    f"names{hint}"
                )


def _is_known(name: str) -> bool:
    if name in (NOT_FINITE, RAISED) or row_of(name) is not None:
        return True
    if "<" not in name:
        return False
    pattern = pattern_of(name)
    return any(pattern.fullmatch(each) for each in rows())


class Guard:
    """Tells the alarms of a run: in its log, its directory, its metrics, a webhook.

    One process of a run has one; the others are told what it decides.

    Args:
        watch: the rules.
        config: of the run's watch.
        directory: of the run.
        clock: Unix time in seconds, for alarms.jsonl.
    """

    def __init__(
        self,
        watch: RunWatch,
        config: WatchConfig,
        directory: RunDirectory,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.watch = watch
        self._config, self._directory, self._clock = config, directory, clock
        self._told: dict[str, int] = {}
        self._log: AlarmLog | None = None
        self._webhook: Webhook | None = None
        self._exposition: Exposition | None = None
        self._checkpoint_bytes = 0
        self._stack = ExitStack()

    def open(self, resume_step: int, checkpoint_bytes: int) -> Self:
        """Opens the log, and follows the steps that it keeps.

        Args:
            resume_step: the last step that the logs keep; -1 for a new run.
            checkpoint_bytes: size of a checkpoint, for the room on the disk.
        """
        self._checkpoint_bytes = checkpoint_bytes
        with self._stack:
            self._log = self._stack.enter_context(
                AlarmLog(self._directory, resume_step=resume_step)
            )
            if (address := self._config.address) is not None:
                names = [rule.name for rule in self.watch.rules]
                try:
                    opened = self._stack.enter_context(serving_metrics(address, names))
                except OSError as error:
                    raise ConfigError(
                        f"--watch.listen: cannot listen on {self._config.listen}: "
                        f"{error}"
                    ) from error
                self._exposition, url = opened
                _LOGGER.warning("metrics and alarms for Prometheus: %s", url)
            if self._config.webhook is not None:
                webhook = Webhook(read_webhook(self._config.webhook))
                self._webhook = self._stack.enter_context(webhook)
            self._follow()
            self._stack = self._stack.pop_all()
        if self._directory.paused.exists():
            _LOGGER.warning(
                "the process before ended while the run was paused; it continues, and "
                "%s is removed",
                self._directory.paused,
            )
            self.end_pause()
        return self

    def _follow(self) -> None:
        """Holds the logged steps of a resumed run against the rules, and tells none."""
        if not self._directory.metrics.exists():
            return
        for row in self._followed():
            values = dict(row.get("metrics") or {}).items()
            measured = {
                k: math.nan if v is None else v
                for k, v in values
                if v is None or isinstance(v, int | float)
            }
            self.watch.look(row["step"], measured)

    def _followed(self) -> list[dict[str, Any]]:
        """The first rows of metrics.jsonl and the last: enough for every rule's past.

        Rules look back over few values, or at the beginning of the run.
        """
        first = list[dict[str, Any]]()
        last = deque[dict[str, Any]](maxlen=max(LAST, 5 * self.watch.longest_past))
        for row in read_rows(self._directory.metrics):
            if len(first) < FIRST:
                first.append(row)
            else:
                last.append(row)
        return [*first, *last]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._tell_unused()
        self._stack.__exit__(kind, error, trace)

    def _tell_unused(self) -> None:
        """Tells which rules of the user's own no step could be held against."""
        usual = default_rules()
        own = {rule.name for rule in self.watch.rules if rule not in usual}
        for name, metrics in self.watch.never_measured().items():
            if name in own:
                _LOGGER.warning(
                    "--watch.rules: no step had %s, so the rule %s was never used",
                    " or ".join(metrics),
                    name,
                )

    def host(self) -> dict[str, float]:
        """Metrics of the machine."""
        return host_metrics(self._directory.path, self._checkpoint_bytes)

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Holds a step against the rules, and tells what is wrong.

        Args:
            step: number of the step.
            metrics: all of the step.

        Returns:
            The alarms that it raises, those with the strongest action first.
        """
        alarms = self.watch.look(step, metrics)
        for alarm in alarms:
            self._tell(alarm)
        if self._exposition is not None:
            self._exposition.update(step, metrics, self.watch.raised)
        if alarms and self._log is not None:
            now = self._clock()
            self._log.write(step, [{"time": now, **each.to_json()} for each in alarms])
        return alarms

    def keep(
        self,
        acting: Acting,
        step: int,
        checkpoint: Path,
        write: Callable[[Path], None],
    ) -> None:
        """Keeps the checkpoint and the batch of a step, for the first `KEPT` alarms.

        Args:
            acting: the alarm.
            step: number of the step.
            checkpoint: directory of its checkpoint, which later ones may replace.
            write: writes the batch to a folder.
        """
        kept = self._directory.evidence
        folder = kept / f"step_{step:06d}-{acting.rule}"
        if folder.exists() or len([*kept.glob("step_*")]) >= KEPT:
            return
        # A process that is killed here leaves nothing that looks whole.
        making = kept / "unfinished"
        try:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir(parents=True)
            write(making)
            if checkpoint.is_dir():
                target = making / "checkpoint"
                shutil.copytree(checkpoint, target, copy_function=_linked)
            replace_file(making / "alarm.txt", f"{acting.told}\n".encode())
            making.rename(folder)
        except OSError as error:
            _LOGGER.warning("alarm: nothing is kept in %s: %s", folder, error)
            shutil.rmtree(making, ignore_errors=True)
            return
        _LOGGER.warning(
            "alarm: checkpoint and batch of step %d are in %s", step, folder
        )

    def begin_pause(self, acting: Acting, step: int) -> None:
        """Writes the file that a person removes so that the run continues."""
        file = self._directory.paused
        content = {"step": step, "rule": acting.rule, "told": acting.told}
        replace_file(file, json.dumps(content, indent=2).encode())
        _LOGGER.warning(
            "paused at step %d by the rule %s, for %s at most. Remove %s to continue; "
            "Ctrl-C saves and ends",
            step,
            acting.rule,
            notation.duration(self._config.pause_s),
            file,
        )

    def waits(self) -> bool:
        """Whether the run is still paused."""
        return self._directory.paused.exists()

    def end_pause(self) -> None:
        """Ends a pause: removes its file."""
        self._directory.paused.unlink(missing_ok=True)

    def _tell(self, alarm: Alarm) -> None:
        name = alarm.rule.name
        self._told[name] = count = self._told.get(name, 0) + 1
        if count <= TOLD:
            _LOGGER.warning("alarm: %s", alarm.told())
        if count == TOLD:
            _LOGGER.warning(
                "further alarms of the rule %s are in %s alone; --watch.off %s takes "
                "it off",
                name,
                self._directory.alarms,
                name,
            )
        if self._webhook is not None:
            text = f"{self._directory.path}: {alarm.told()}"
            place = str(self._directory.path)
            self._webhook.send({"run": place, "text": text, **alarm.to_json()})


def _linked(source: str, target: str) -> str:
    """Links a file that is never changed, or copies it where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
