"""Tells from a run's files what went wrong with it."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_post.files import REMEDIES, free_bytes
from jaxrl_post.jsonl import json_file
from jaxrl_post.learner.checkpoint import UNREAD
from jaxrl_post.learner.manifest import find_damage
from jaxrl_post.records import notation
from jaxrl_post.records.alarms import read_alarms
from jaxrl_post.records.directory import RunDirectory, last_rows, read_rows
from jaxrl_post.records.ending import Ending, read_ending
from jaxrl_post.records.lock import holder_of
from jaxrl_post.records.metric_table import MISMATCH, TRUNCATED, row_of

__all__ = ["Case", "Diagnosis", "diagnosed", "read_case"]

# Rows that are kept while metrics.jsonl is read; samples, and bytes at the end of
# samples.jsonl, which may be larger than memory.
ROWS, SAMPLES, SAMPLE_BYTES = 2000, 200, 2**24
# Rows before an alarm that its step is compared with.
BEFORE = 50
# Free bytes under which a disk counts as full.
FULL = 16 * 2**20
# A step counts as stuck after so many times the median step, and so many seconds.
STUCK, STUCK_S = 20, 60.0
# Rules that tell a consequence, to which a rule that tells a cause is preferred if its
# alarm begins within so many steps.
GENERAL = ("mismatch", "mismatch-kl", "off-policy", "effective-samples", "not-finite")
NEAR = 3
# Factor up to which sampler and trainer agree, in any precision.
AGREED = 1.03
# Share of the answers that are cut, from the first step on, if none ever ends.
NEVER_ENDS = 0.9


@dataclass(frozen=True)
class Case:
    """A run as its files tell it.

    Attributes:
        directory: of the run.
        description: of config.json, {} if there is none.
        rows: the first rows of metrics.jsonl and the last `ROWS`.
        alarms: rows of alarms.jsonl.
        samples: the last `SAMPLES` rows of samples.jsonl.
        ending: of the last process; None if it wrote none.
        holder: the process that the lock names, and whether it holds it.
        free: free bytes on the disk.
        damage: of checkpoints, by step.
        unreadable: files that cannot be read, with the reason.
        now: Unix time in seconds.
    """

    directory: RunDirectory
    description: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    alarms: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    ending: Ending | None
    holder: tuple[str, bool] | None
    free: float
    damage: Mapping[int, str]
    unreadable: Mapping[str, str]
    now: float

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def steps(self) -> int | None:
        """The steps that the run was to take; None if that is not known."""
        config = self.description.get("config")
        steps = config.get("steps") if isinstance(config, dict) else None
        return steps if isinstance(steps, int) else None

    def values(self, metric: str) -> list[float]:
        """The finite values of a metric."""
        found = (row["metrics"].get(metric) for row in self.rows)
        return [value for value in found if isinstance(value, int | float)]


@dataclass(frozen=True)
class Diagnosis:
    """The cause that fits best, and what speaks for it.

    Attributes:
        kind: of the cause, such as "killed" or the name of a rule; "healthy" for none.
        cause: one line.
        evidence: lines.
        remedy: what to do.
    """

    kind: str
    cause: str
    evidence: list[str] = field(default_factory=list)
    remedy: str = ""


def read_case(directory: RunDirectory) -> Case:
    """Reads the files of a run, also of one that runs, or that was cut off.

    Raises:
        ValueError: it is no directory of a run.
    """
    if not directory.path.is_dir() or not any(
        each.exists() for each in (directory.config, directory.metrics)
    ):
        raise ValueError(
            f"{directory.path} is no run directory: it has neither config.json nor "
            "metrics.jsonl; give the --run-dir of a run"
        )
    unreadable = dict[str, str]()

    def read[Found](path: Path, reader: Callable[[], Found], other: Found) -> Found:
        try:
            return reader() if path.exists() else other
        except (OSError, ValueError) as error:
            unreadable[path.name] = str(error)
            return other

    def metrics() -> list[Mapping[str, Any]]:
        first, last = list[Mapping[str, Any]](), deque[Mapping[str, Any]](maxlen=ROWS)
        for row in read_rows(directory.metrics):
            if not isinstance(row.get("metrics"), dict) or "time" not in row:
                raise ValueError(f"the row of step {row['step']} has no metrics")
            if len(first) < BEFORE:
                first.append(row)
            else:
                last.append(row)
        return [*first, *last]

    def described() -> Mapping[str, Any]:
        found = json_file(directory.config)
        if not isinstance(found, dict):
            raise ValueError(f"it must be an object; got {found!r:.80}")
        return found

    checkpoints = directory.path / "checkpoints"
    saved = [each for each in checkpoints.glob("[0-9]*") if each.name.isdecimal()]
    damage = {
        int(each.name): find_damage(each, ignored=UNREAD, sizes_only=True)
        for each in saved
    }
    return Case(
        directory=directory,
        description=read(directory.config, described, {}),
        rows=read(directory.metrics, metrics, []),
        alarms=read(directory.alarms, lambda: read_alarms(directory), []),
        samples=read(
            directory.samples,
            lambda: last_rows(directory.samples, SAMPLES, SAMPLE_BYTES),
            [],
        ),
        ending=read_ending(directory.ending),
        holder=holder_of(directory.path),
        free=free_bytes(directory.path),
        damage={step: told for step, told in sorted(damage.items()) if told},
        unreadable=unreadable,
        now=time.time(),
    )


def diagnosed(case: Case) -> Diagnosis:
    """Finds the cause: first how the run ended, then the rule that fired first."""
    for look in (
        _ended_by_error,
        _damaged,
        _running,
        _killed,
        _never_ends,
        _first_alarm,
    ):
        if (found := look(case)) is not None:
            return found
    if case.ending is not None and case.steps and case.step < case.steps:
        return Diagnosis(
            "stopped",
            f"stopped: the run was told to end after step {case.step} of {case.steps}; "
            "no rule was broken",
            remedy="The same command resumes it.",
        )
    state = "running" if case.holder and case.holder[1] else "complete"
    return Diagnosis(
        "healthy", f"healthy: {state} at step {case.step}, and no rule was broken"
    )


# Errors that end a run: the kind of their cause, a sentence, and what to do.
ERRORS: Mapping[str, tuple[str, str, str]] = {
    "DivergenceError": (
        "diverged",
        "the loss or the gradient was not finite",
        "Resume from an earlier checkpoint with a lower --optimizer.learning-rate, or "
        "with --dtype float32.",
    ),
    "MismatchError": (
        "mismatch",
        "sampler and trainer give different probabilities to the same tokens",
        "Compare --dtype float32, --kernels xla and --exact.",
    ),
    "FailedRolloutsError": (
        "failed-judgements",
        "too many answers could not be judged",
        "See the errors of the samples; look at the judge's host, the grader, "
        "--rollout.reward-deadline-s and --rollout.reward-memory-gib.",
    ),
    "RolloutTimeoutError": (
        "stuck-rollouts",
        "the rollouts of a step took longer than --rollout.deadline-s: a judge, an "
        "agent or a sampler does not answer",
        "Look at time/reward and at the judge's host; bound a judgement by "
        "--rollout.reward-deadline-s.",
    ),
    "FleetError": (
        "lost-samplers",
        "too few samplers were left",
        "Look at the samplers' logs, and start them again with launch.serve --follow.",
    ),
    "ProbeError": (
        "mismatch",
        "a sampler answered the trainer's probe with other log-probs",
        "Start the sampler with the trainer's versions.",
    ),
    "CheckpointError": (
        "damaged-checkpoint",
        "a checkpoint could not be written or read",
        "Remove the damaged one, so that the run resumes from the one before.",
    ),
    "OutOfMemoryError": (
        "out-of-memory",
        "the devices have too little memory",
        "python -m launch.plan shows the parts; lower --update.microbatch-tokens or "
        "--rollout.num-slots, or split the model by --mesh.",
    ),
    "CallbackError": (
        "callback",
        "a function of --callbacks raised",
        "Mend the function; the run is saved and resumes.",
    ),
    "ProcessesError": (
        "lost-process",
        "a process of the run was lost, or came too late",
        "Look at the logs of all hosts; the run resumes from its last checkpoint.",
    ),
    "WorkerStartError": (
        "lost-workers",
        "the processes that judge could not be started",
        "Look at the environment's imports and --rollout.judges.",
    ),
    "WorkerLostError": (
        "lost-workers",
        "the processes that judge were lost",
        "Look at the memory of their hosts, and at --rollout.reward-memory-gib.",
    ),
    "PushError": (
        "upload",
        "the model is trained and saved, and could not be uploaded",
        "Upload the folder model by hand, or start the same command again.",
    ),
    "KeyboardInterrupt": (
        "interrupted",
        "a second Ctrl-C ended it at once",
        "The same command resumes it from its last checkpoint.",
    ),
    "MemoryError": (
        "out-of-memory",
        "the machine has too little memory",
        "Fewer --rollout.reward-workers, or a larger machine.",
    ),
}
# Words in the message of failed rollouts whose server was away, and what is told then.
AWAY = "since a server was away"
LACKING = (
    "away-server",
    "a server that judges was away until --retries.judges-s was used up, or the run "
    "was told to stop",
    "Look at the judge's host, and start the same command again when it is back; a "
    "larger --retries.judges-s waits longer.",
)
# Words in the message of a refused start, and the kind of its cause.
REFUSED = (
    ("template", "wrong-template"),
    ("tokenizer", "wrong-tokenizer"),
    ("checkpoint", "damaged-checkpoint"),
    ("has changed", "changed-inputs"),
    ("have changed", "changed-inputs"),
    ("then, ", "changed-options"),
)


def _ended_by_error(case: Case) -> Diagnosis | None:
    ending = case.ending
    if ending is None or not ending.error:
        return None
    told = ending.told.strip().splitlines()
    first = told[0] if told else "it has no message"
    # The last lines of a traceback say more than its middle.
    shown = told if len(told) <= 6 else [*told[:3], "...", *told[-3:]]
    evidence = [f"{ending.error}: {line}" for line in shown] or [ending.error]
    if ending.error == "AlarmError":
        found = _first_alarm(case)
        stopped = [each for each in case.alarms if each["action"] in ("stop", "pause")]
        rule = stopped[-1]["rule"] if stopped else "unknown"
        cause = f"{rule}: the rule {rule} ended the run after step {case.step}"
        if found is not None and found.kind != rule:
            evidence = [f"the first alarm: {found.cause}", *evidence]
        look = stopped[-1]["look"] if stopped else ""
        return Diagnosis(rule, cause, evidence + _moved(case, stopped), look)
    if ending.errno in REMEDIES:
        kind = "full-disk" if case.free < FULL or ending.errno == 28 else "disk"
        remedy = REMEDIES[ending.errno]
        cause = f"{kind}: a file could not be written after step {case.step}: {first}"
        return Diagnosis(kind, cause, evidence, f"{remedy[0].upper()}{remedy[1:]}.")
    if ending.error in ERRORS:
        kind, sentence, remedy = ERRORS[ending.error]
        if ending.error == "FailedRolloutsError" and AWAY in ending.told:
            kind, sentence, remedy = LACKING
        cause = f"{kind}: {sentence}, after step {case.step}"
        alarm = _leading(case)
        if kind == "mismatch" and alarm is not None and alarm["rule"] not in GENERAL:
            kind, remedy = alarm["rule"], alarm["look"]
            cause = f"{kind}: {alarm['means']} Then {sentence}, after step {case.step}."
        elif kind == "mismatch" and (case.values(MISMATCH) or [2.0])[0] <= AGREED:
            kind = "stale-weights"
            cause = (
                f"{kind}: sampler and trainer agreed at first, and differ after step "
                f"{case.step}: the sampler does not follow the updates"
            )
            remedy = "Publish every version to the sampler; restart samplers of yours."
        evidence += [*_alarmed(case), *_failures(case)]
        return Diagnosis(kind, cause, evidence, remedy)
    if ending.error in ("ConfigError", "MeshError", "TokenizerError", "RewrittenError"):
        kinds = (kind for word, kind in REFUSED if word in ending.told)
        kind = next(kinds, "refused")
        cause = f"{kind}: its last start was refused: {first}"
        return Diagnosis(kind, cause, evidence, "Do as the message says.")
    cause = f"fault: {ending.error} after step {case.step}: {first}"
    frames = [line.rstrip() for frame in ending.frames for line in frame.splitlines()]
    return Diagnosis("fault", cause, evidence + frames[-12:], "Report the block below.")


def _damaged(case: Case) -> Diagnosis | None:
    if case.unreadable:
        name, reason = next(iter(case.unreadable.items()))
        cause = f"damaged-log: {name} cannot be read: {reason}"
        remedy = "Remove the line that the message names, or restore the file."
        return Diagnosis("damaged-log", cause, [*case.unreadable.values()], remedy)
    if case.damage and case.ending is None:
        step, told = max(case.damage.items())
        return Diagnosis(
            "damaged-checkpoint",
            f"damaged-checkpoint: the checkpoint of step {step} is damaged: {told}",
            remedy="The run sets it aside and resumes from the one before.",
        )
    return None


def _running(case: Case) -> Diagnosis | None:
    if case.holder is None or not case.holder[1]:
        return None
    if case.directory.paused.exists():
        return Diagnosis(
            "paused",
            f"paused: the run waits at step {case.step} until {case.directory.paused} "
            "is removed",
            _pause(case),
        )
    steps = case.values("time/step")
    if case.rows and steps:
        silent = case.now - case.rows[-1]["time"]
        usual = statistics.median(steps)
        # An evaluation or a checkpoint may take longer than steps.
        others = [*case.values("time/eval"), *case.values("time/checkpoint"), 0.0]
        if silent > max(STUCK_S, STUCK * usual, 3 * max(others)):
            return Diagnosis(
                "stuck",
                f"stuck: step {case.step + 1} has taken {notation.duration(silent)} so "
                f"far, and a step {notation.duration(usual)} before",
                [f"held by {case.holder[0]}", *_phases(case), *_failures(case)],
                "A judge or a sampler that does not answer: look at its host; py-spy "
                "dump --pid shows where the process waits.",
            )
    return None


def _pause(case: Case) -> list[str]:
    """The alarm for which the run waits."""
    try:
        return [str(json_file(case.directory.paused)["told"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _killed(case: Case) -> Diagnosis | None:
    if case.ending is not None or (case.holder and case.holder[1]):
        return None
    if case.free < FULL:
        return Diagnosis(
            "full-disk",
            f"full-disk: the disk has {case.free / 2**20:.1f} MiB left, and the "
            f"process ended after step {case.step}",
            remedy="Free space there; the same command resumes the run.",
        )
    if case.holder is None:
        # A run of an earlier version: it did not record its end.
        return None
    share = (case.values("host/memory_share") or [0.0])[-1]
    full = f"; {share:.0%} of the memory was taken" if share > 0.9 else ""
    return Diagnosis(
        "killed",
        f"killed: the process ended after step {case.step} without a word{full}",
        [f"the lock names {case.holder[0]}", *_phases(case)],
        "By kill -9, by the system because memory was full (dmesg says so), or with "
        "its machine. The same command resumes it from its last checkpoint.",
    )


def _never_ends(case: Case) -> Diagnosis | None:
    cut = case.values(TRUNCATED)[:5]
    if len(cut) < 3 or min(cut) < NEVER_ENDS:
        return None
    return Diagnosis(
        "wrong-template",
        f"wrong-template: from the first step on {min(cut):.0%} of the answers and "
        "more were cut: the model does not end them under this chat template and "
        "these stop tokens",
        [*_alarmed(case), *_texts(case, case.samples[-3:])],
        "Compare the chat template and eos_token_id with the model's own: the token "
        "that ends a turn must be a stop token. Or raise --rollout.max-tokens, if the "
        "answers only are long.",
    )


def _first_alarm(case: Case) -> Diagnosis | None:
    first = _leading(case)
    if first is None:
        return None
    cause = f"{first['rule']}: {first['means']} First at step {first['first']}."
    evidence = [f"step {first['step']}: {first['evidence']}"]
    if first["causes"]:
        evidence.append(f"usual causes: {first['causes']}")
    others = [each for each in _alarmed(case) if f" {first['rule']} at" not in each]
    evidence += others + _moved(case, [first]) + _failures(case)
    evidence += _texts(case, _worst(case))
    return Diagnosis(first["rule"], cause, evidence, first["look"])


def _leading(case: Case) -> Mapping[str, Any] | None:
    """The first alarm, or one of the next steps that says more than it."""
    if not case.alarms:
        return None
    first = case.alarms[0]
    near = [each for each in case.alarms if each["first"] <= first["step"] + NEAR]
    said = [each for each in near if each["rule"] not in GENERAL]
    return said[0] if first["rule"] in GENERAL and said else first


def _alarmed(case: Case) -> list[str]:
    """The first alarm of every rule."""
    told = dict[str, str]()
    for each in case.alarms:
        line = f"alarm of {each['rule']} at step {each['step']}: {each['evidence']}"
        told.setdefault(each["rule"], line)
    return [*told.values()][:8]


def _moved(case: Case, alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that changed most where the first of some alarms began."""
    if not alarms:
        return []
    at = alarms[0]["first"]
    before = [row["metrics"] for row in case.rows if 0 < row["step"] < at][-BEFORE:]
    then = [row["metrics"] for row in case.rows if row["step"] >= at][:3]
    if len(before) < 5 or not then:
        return []
    moves = list[tuple[float, str]]()
    for name in then[0]:
        past = [row[name] for row in before if isinstance(row.get(name), int | float)]
        now = [row[name] for row in then if isinstance(row.get(name), int | float)]
        if len(past) < 5 or not now or row_of(name) is None:
            continue
        centre, value = statistics.median(past), statistics.median(now)
        spread = statistics.median(abs(each - centre) for each in past)
        apart = abs(value - centre) / (1.4826 * spread + 1e-3 * abs(centre) + 1e-12)
        if math.isfinite(apart) and apart > 5:
            told = f"{name} moved from {centre:.4g} to {value:.4g} at step {at}"
            moves.append((apart, told))
    return [told for _, told in sorted(moves, reverse=True)[:5]]


def _phases(case: Case) -> list[str]:
    """The phases of the last step that took much longer than before."""
    found = list[str]()
    for name in ("time/rollout", "time/reward", "time/train", "time/checkpoint"):
        values = case.values(name)
        if len(values) > 5 and values[-1] > 3 * statistics.median(values) + 1:
            usual = notation.duration(statistics.median(values))
            found.append(f"{name} was {notation.duration(values[-1])}, usually {usual}")
    return found


def _failures(case: Case) -> list[str]:
    """Kinds of failed judgements, and an error of one."""
    found, kinds = list[str](), dict[str, float]()
    for row in case.rows:
        for name, value in row["metrics"].items():
            if name.startswith("rollout/failed/") and isinstance(value, int | float):
                kinds[name] = kinds.get(name, 0.0) + value
    found += [f"{name} {value:g} in all" for name, value in kinds.items() if value]
    errors = [str(each["error"]) for each in case.samples if each.get("error")]
    return found + [f"an error: {text:.300}" for text in errors[-1:]]


def _worst(case: Case) -> Sequence[Mapping[str, Any]]:
    """The samples of the last logged step with the least reward, failed ones first."""
    if not case.samples:
        return []
    last = [each for each in case.samples if each["step"] == case.samples[-1]["step"]]
    found = [each.get("reward") for each in last]
    rewards = [e if isinstance(e, int | float) else -math.inf for e in found]
    order = sorted(range(len(last)), key=rewards.__getitem__)
    return [last[place] for place in order[:3]]


def _texts(case: Case, samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Samples in a line each."""
    del case
    return [
        f"sample of step {each['step']}, reward {each.get('reward')}: "
        f"{str(each.get('prompt'))[-120:]!r} -> {str(each.get('completion'))[:200]!r}"
        for each in samples
    ]
