"""Watches a run: holds its steps against rules, tells alarms, and acts on them."""

import difflib
import json
import logging
import math
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_post.config.checks import read_webhook
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig, WatchConfig, flattened
from jaxrl_post.files import replace_file
from jaxrl_post.programs.watching.host import host_metrics
from jaxrl_post.programs.watching.webhook import Webhook
from jaxrl_post.records import notation
from jaxrl_post.records.alarms import AlarmLog
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.metric_table import row_of, rows
from jaxrl_post.watch.alarms import NOT_FINITE, RAISED, Alarm, RunWatch
from jaxrl_post.watch.bounds import RuleError, pattern_of
from jaxrl_post.watch.rule import Rule, default_rules, read_rules

if TYPE_CHECKING:
    from jaxrl_post.programs.watching.exposition import Exposition

__all__ = ["Acting", "AlarmError", "Guard", "acting_of", "guarding", "open_watch"]

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


@dataclass
class Guard:
    """Tells the alarms of a run: in its log, its directory, its metrics, a webhook.

    One process of a run has one; the others are told what it decides.

    Attributes:
        watch: the rules.
        config: of the run's watch.
        directory: of the run.
        checkpoint_bytes: size of a checkpoint, for the room on the disk.
        log: of alarms.
        webhook: posts alarms; None for none.
        exposition: serves metrics; None for none.
        clock: Unix time in seconds, for alarms.jsonl.
    """

    watch: RunWatch
    config: WatchConfig
    directory: RunDirectory
    checkpoint_bytes: int
    log: AlarmLog
    webhook: Webhook | None
    exposition: "Exposition | None"
    clock: Callable[[], float]
    # How often each rule was told.
    _told: Counter[str] = field(default_factory=Counter, init=False)

    def follow(self) -> None:
        """Holds the logged steps of a resumed run against the rules, and tells none."""
        if not self.directory.metrics.exists():
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
        for row in read_rows(self.directory.metrics):
            if len(first) < FIRST:
                first.append(row)
            else:
                last.append(row)
        return [*first, *last]

    def tell_unused(self) -> None:
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
        return host_metrics(self.directory.path, self.checkpoint_bytes)

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
        if self.exposition is not None:
            self.exposition.update(step, metrics, self.watch.raised)
        if alarms:
            now = self.clock()
            self.log.write(step, [{"time": now, **each.to_json()} for each in alarms])
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
        kept = self.directory.evidence
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
        file = self.directory.paused
        content = {"step": step, "rule": acting.rule, "told": acting.told}
        replace_file(file, json.dumps(content, indent=2).encode())
        _LOGGER.warning(
            "paused at step %d by the rule %s, for %s at most. Remove %s to continue; "
            "Ctrl-C saves and ends",
            step,
            acting.rule,
            notation.duration(self.config.pause_s),
            file,
        )

    def waits(self) -> bool:
        """Whether the run is still paused."""
        return self.directory.paused.exists()

    def end_pause(self) -> None:
        """Ends a pause: removes its file."""
        self.directory.paused.unlink(missing_ok=True)

    def _tell(self, alarm: Alarm) -> None:
        name = alarm.rule.name
        self._told[name] += 1
        count = self._told[name]
        if count <= TOLD:
            _LOGGER.warning("alarm: %s", alarm.told())
        if count == TOLD:
            _LOGGER.warning(
                "further alarms of the rule %s are in %s alone; --watch.off %s takes "
                "it off",
                name,
                self.directory.alarms,
                name,
            )
        if self.webhook is not None:
            text = f"{self.directory.path}: {alarm.told()}"
            place = str(self.directory.path)
            self.webhook.send({"run": place, "text": text, **alarm.to_json()})


@contextmanager
def guarding(
    watch: RunWatch,
    config: WatchConfig,
    directory: RunDirectory,
    *,
    resume_step: int,
    checkpoint_bytes: int,
    clock: Callable[[], float] = time.time,
) -> Iterator[Guard]:
    """Opens what a guard tells alarms to, and follows the steps before.

    Args:
        watch: the rules.
        config: of the run's watch.
        directory: of the run.
        resume_step: the last step that the logs keep; -1 for a new run.
        checkpoint_bytes: size of a checkpoint, for the room on the disk.
        clock: Unix time in seconds, for alarms.jsonl.

    Raises:
        ConfigError: the address of `listen` is taken.
    """
    with ExitStack() as stack:
        log = stack.enter_context(AlarmLog(directory, resume_step=resume_step))
        exposition = webhook = None
        if (address := config.address) is not None:
            # Only here: it reads pages, and a page reads what runs with rollouts write.
            from jaxrl_post.programs.watching.exposition import serving_run

            names = [rule.name for rule in watch.rules]
            try:
                opened = stack.enter_context(serving_run(address, directory, names))
            except OSError as error:
                raise ConfigError(
                    f"--watch.listen: cannot listen on {config.listen}: {error}"
                ) from error
            exposition, url = opened
            _LOGGER.warning(
                "page of the run: %s; metrics for Prometheus: %s/metrics", url, url
            )
        if config.webhook is not None:
            webhook = stack.enter_context(Webhook(read_webhook(config.webhook)))
        guard = Guard(
            watch, config, directory, checkpoint_bytes, log, webhook, exposition, clock
        )
        guard.follow()
        if guard.waits():
            _LOGGER.warning(
                "the process before ended while the run was paused; it continues, and "
                "%s is removed",
                directory.paused,
            )
            guard.end_pause()
        yield guard
        guard.tell_unused()


def _linked(source: str, target: str) -> str:
    """Links a file that is never changed, or copies it where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
