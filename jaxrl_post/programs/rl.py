"""The trainer of runs that sample, and of those that imitate what they would sample."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.data import packing
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.fleet.probe import Examiner, ProbeAnswers, ask
from jaxrl_post.learner.learner import Update
from jaxrl_post.learner.model import Model
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.updater import Updater
from jaxrl_post.programs.apart.answers import Answering
from jaxrl_post.programs.build.layouts import SamplerLayout
from jaxrl_post.programs.experience import Evaluation, Experience
from jaxrl_post.programs.loop import Trainer
from jaxrl_post.programs.watching.graders import Graders
from jaxrl_post.records.directory import JsonLines, RunDirectory
from jaxrl_post.records.metric_table import ACCURACY
from jaxrl_post.records.rollouts import RolloutLog
from jaxrl_post.records.rows.conversations import conversation
from jaxrl_post.records.rows.evaluations import evaluation_row
from jaxrl_post.records.sinks import NoLog, Sample, SampleLog
from jaxrl_post.records.timeline import Timeline
from jaxrl_post.rollout.ahead import Ahead
from jaxrl_post.rollout.buffer import Buffer
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.events import Tell, silent, told
from jaxrl_post.rollout.fleet import Fleet
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Engine
from jaxrl_post.sharding import processes

if TYPE_CHECKING:
    # It needs the extra serve.
    from jaxrl_post.programs.apart.remote import Remote

__all__ = ["MEASURED", "Apart", "Colocated", "Imitated", "OnlineTrainer"]

# Metrics that every evaluation has; an environment has others of its own.
MEASURED = (
    ACCURACY, "eval/accuracy_low", "eval/accuracy_high", "eval/reward", "eval/failed",
    "eval/truncated_fraction",
)  # fmt: skip

# Keys of a checkpoint's meta: samples of the last step and its diagnostics, which are
# logged with its evaluation.
SHOWN, DIAGNOSED = "samples_due", "diagnostics_due"
# Key of a checkpoint's meta: the batches that were sampled ahead of their steps.
AHEAD = "ahead"
# Key of a checkpoint's meta: the number of rows of the timeline before it.
TIMELINE = "timeline"


@dataclass
class Colocated:
    """Weights of a sampler on the trainer's devices: the same arrays, or one copy.

    Attributes:
        engine: the sampler.
        layout: where the sampler has the parameters.
        updater: has the parameters.
        tell: told of each version that is published.
    """

    engine: Engine
    layout: SamplerLayout
    updater: Updater
    tell: Tell = silent
    _spent: dict[str, float] = field(default_factory=dict, init=False)
    # Passes of the model and tokens that they sampled, at the last `publish`.
    _passes: tuple[int, int] = field(default=(0, 0), init=False)

    @property
    def unbound(self) -> Published:
        """The sampler without parameters, which says what fits it."""
        return Published(self.engine, None, 0)

    def publish(self) -> Published:
        """Hands the current parameters to the sampler."""
        begin = time.perf_counter()
        state = self.updater.state
        published = self.layout.publish(
            self.engine, self.updater.model, state.params, int(state.step)
        )
        # An evaluation may move a version before the step that samples by it.
        moved = self._spent.get("publish/bytes_moved", 0.0) + published.bytes_moved
        self._spent["publish/bytes_moved"] = float(moved)
        self._spent["time/publish"] = seconds = time.perf_counter() - begin
        _tell_published(self.tell, published.version, published.bytes_moved, seconds)
        self._passes = self.engine.guessing.passes, self.engine.guessing.tokens
        return published

    def metrics(self) -> dict[str, float]:
        """Returns what publishing took since the last call, and sampling since then."""
        found, self._spent = self._spent, {}
        guessing = self.engine.guessing
        passes, sampled = self._passes
        if guessing.passes > passes:
            made = guessing.tokens - sampled
            found["sampler/tokens_per_pass"] = made / (guessing.passes - passes)
        # Counted in this process: a resumed run compiles again.
        found["time/compilations"] = float(self.engine.compilations.total())
        return found

    def close(self, *, completed: bool) -> None:
        """Does nothing: the sampler runs in the trainer's thread."""


@dataclass
class Apart:
    """Weights of samplers that have devices of their own.

    Each version is compared with the trainer's own log-probs before it samples.

    Attributes:
        samplers: each with where it has the parameters.
        updater: has the parameters.
        answering: answers the probe.
        tell: told of each version that is published.
    """

    samplers: Sequence[tuple[Engine, SamplerLayout]]
    updater: Updater
    answering: Answering
    tell: Tell = silent
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _spent: dict[str, float] = field(default_factory=dict, init=False)
    # The last trained parameters that were published, and their copies.
    _last: tuple[Any, Sequence[Published]] = field(default=(None, ()), init=False)
    # The trainer's answers, by version, of those that no sampler has served.
    _answers: dict[int, ProbeAnswers] = field(default_factory=dict, init=False)
    # The examiner of each sampler, and the last version that it accepted.
    _examiners: list[Examiner] = field(init=False)
    _accepted: list[int] = field(init=False)
    # The mean difference of each sampler's log-probs at its last probe, in nats.
    _apart: dict[int, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._examiners = [Examiner() for _ in self.samplers]
        self._accepted = [-1 for _ in self.samplers]

    @property
    def unbound(self) -> Fleet:
        """The samplers without parameters, which say what fits them."""
        return Fleet(
            [Published(each, None, 0) for each, _ in self.samplers], self._stop
        )

    def publish(self) -> Fleet:
        """Begins to copy the current parameters to the samplers' devices.

        The samplers may still use earlier ones meanwhile. The parameters of the last
        call, such as for an evaluation, are not copied again.
        """
        begin = time.perf_counter()
        state, model = self.updater.state, self.updater.model
        source, published = self._last
        if source is not state.params:
            published = [
                layout.publish(engine, model, state.params, int(state.step))
                for engine, layout in self.samplers
            ]
            self._last = state.params, published
            self._answers[int(state.step)] = self.answering.answers(state.params)
            moved = sum(each.bytes_moved for each in published)
            self._spent["publish/bytes_moved"] = float(moved)
            seconds = time.perf_counter() - begin
            _tell_published(self.tell, published[0].version, moved, seconds)
        self._spent.setdefault("publish/bytes_moved", 0.0)
        self._spent["time/publish"] = time.perf_counter() - begin
        return Fleet(published, self._stop, self._examine)

    def _examine(self, sampler: Published) -> None:
        """Compares a sampler with the trainer, once for each version.

        Raises:
            ProbeError: it computes something else.
        """
        place = [engine for engine, _ in self.samplers].index(sampler.engine)
        if self._accepted[place] == sampler.version:
            return
        vocab = self.updater.model.config.vocab_size
        found = ask(sampler, self.answering.rows, vocab)
        apart = self._examiners[place].examine(found, self._answers[sampler.version])
        self._apart[place] = apart
        self._accepted[place] = sampler.version
        for version in [each for each in self._answers if each < min(self._accepted)]:
            del self._answers[version]

    def metrics(self) -> dict[str, float]:
        """Returns what publishing took since the last call."""
        found, self._spent = self._spent, {}
        compiled = sum(engine.compilations.total() for engine, _ in self.samplers)
        if self._apart:
            found["mismatch/probe"] = max(self._apart.values())
        return found | {"time/compilations": float(compiled)}

    def close(self, *, completed: bool) -> None:
        """Makes samplers that run in a thread end soon, with an error."""
        del completed
        self._stop.set()


@dataclass
class Imitated:
    """The buffer of a run on demonstrations: as many as a step would have samples.

    Attributes:
        demonstrations: to train on.
        experience: has the iterator over their tasks.
        model: has the tokenizer.
        count: demonstrations of a step.
    """

    demonstrations: Demonstrations
    experience: Experience
    model: Model
    count: int

    def take(self) -> list[packing.Sequence]:
        """Returns the next demonstrations as sequences."""
        found = list[packing.Sequence]()
        for _ in range(self.count):
            index = int(next(self.experience.indices))
            found += self.demonstrations.encode(self.model.tokenizer, "train", index)
        return found


@dataclass
class OnlineTrainer(Trainer):
    """The trainer of an RL run.

    Attributes:
        updater: trains on groups of episodes, or on demonstrations.
        weights: the sampler's parameters.
        experience: collects episodes, and evaluates.
        queue: the groups that wait for later steps; None if nothing is sampled.
        ahead: samples batches before their steps; None to sample each in its step.
        directory: of the run; None to log no samples.
        timeline: of the run; None to write none.
        graders: held-out graders of its answers.
        groups: the groups of the last step.
    """

    updater: Updater
    weights: "Colocated | Apart | Remote" = field(kw_only=True)
    experience: Experience = field(kw_only=True)
    queue: Buffer | None = field(default=None, kw_only=True)
    ahead: Ahead | None = field(default=None, kw_only=True)
    directory: RunDirectory | None = field(default=None, kw_only=True)
    timeline: Timeline | None = field(default=None, kw_only=True)
    graders: Graders = field(default_factory=Graders, kw_only=True)
    groups: Sequence[Group] = field(default=(), init=False)
    # The last step that was begun.
    _step: int = field(default=0, init=False)
    _trained_on: Sequence[Sample] = field(default=(), init=False)
    _samples: SampleLog | NoLog = field(default_factory=NoLog, init=False)
    # Logs with a row per evaluation, by the names of their files.
    _logs: dict[str, JsonLines] = field(default_factory=dict, init=False)
    _rollouts: RolloutLog | None = field(default=None, init=False)

    @property
    def config(self) -> RLConfig:
        """The configuration of the run."""
        return self.updater.config

    @property
    def tell(self) -> Tell:
        """Writes an event to the timeline, if there is one."""
        return silent if self.timeline is None else self.timeline.tell

    def step(self, number: int) -> tuple[dict[str, float], list[Group]]:
        """Takes a step, as `Trainer.step`; the groups are none of demonstrations."""
        self._step = number
        metrics, batch = super().step(number)
        groups = [each for each in batch if isinstance(each, Group)]
        self.groups = groups
        begin = time.perf_counter()
        episodes = [episode for group in groups for episode in group.episodes]
        graded = self._graded(lambda: self.graders.trained(episodes))
        if graded:
            metrics |= graded | {"time/graders": time.perf_counter() - begin}
        if self._rollouts is not None and self.config.log_rollouts is not None:
            advantages = self.updater.advantages
            self._rollouts.write(number, groups, advantages, self.updater.trains)
        self._trained_on = _samples(
            "train", groups, self.config.log_samples, self.updater.trains
        )
        return metrics, groups

    def _graded(self, grade: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The held-out graders' metrics, which process 0 measures for all."""
        if not self.config.eval.graders:
            return {}
        found = {} if processes.index() else grade()
        return processes.exchange("graders", found)[0]

    def update(self, batch: Any, number: int) -> Update:
        """Trains on the batch of a step."""
        with told(self.tell, "update", {"step": number}):
            return super().update(batch, number)

    def evaluate(self) -> Evaluation:
        """Answers the held-out tasks greedily; training continues as if resumed here.

        Raises:
            FailedRolloutsError: too many answers could not be judged.
            RolloutTimeoutError: sampling or judging took too long.
        """
        self.settle()
        return self.experience.evaluate(self.weights.publish())

    def settle(self) -> None:
        """Waits until no batch is being sampled."""
        if self.ahead is not None:
            self.ahead.settle()

    @property
    def indices(self) -> grain.DatasetIterator:
        """Iterator over the training tasks."""
        return self.experience.indices

    @property
    def layout(self) -> TrainState:
        """Shardings of `snapshot`."""
        return self.updater.layout

    def logs(self, resume_step: int, step: int) -> AbstractContextManager[Any]:
        """Opens the logs of samples, evaluations, rollouts and events, in process 0."""
        opened = ExitStack()
        enter = opened.enter_context
        if self.directory is not None and not processes.index():
            self._samples = enter(SampleLog(self.directory, resume_step=resume_step))
            for path in (self.directory.evaluations, self.directory.diagnostics):
                log = enter(closing(JsonLines(path, resume_step)))
                self._logs[path.name] = log
            self._rollouts = RolloutLog(self.directory, resume_step=step)
            if self.timeline is not None and self.ahead is not None:
                self.timeline.open()
        return opened

    def keep(self, folder: Path) -> None:
        """Writes the samples of the last step as JSON lines."""
        count = sum(len(group.episodes) for group in self.groups)
        with SampleLog(RunDirectory(folder)) as log:
            log.write(
                self._step, _samples("train", self.groups, count, self.updater.trains)
            )

    def counts(self) -> dict[str, int]:
        """The number of logged samples and events, and of files of rollouts."""
        counts = self._samples.counts()
        counts |= {name: log.count for name, log in self._logs.items()}
        for log in (self._rollouts, self.timeline):
            counts |= {} if log is None else log.counts()
        return counts

    def snapshot(self) -> TrainState:
        """Returns all arrays that a checkpoint holds."""
        return self.updater.snapshot()

    def meta(self, *, due: bool = False) -> dict[str, Any]:
        """Returns everything in a checkpoint but arrays and the iterator, as JSON."""
        # The batches that wait are of earlier parameters, which no checkpoint holds.
        self.settle()
        self.tell("save", {"step": self._step})
        shown = map(dataclasses.asdict, self._trained_on if due else ())
        return {
            "seed": self.config.seed,
            **self.experience.state(),
            "queue": [] if self.queue is None else self.queue.to_json(),
            **({} if self.ahead is None else {AHEAD: self.ahead.state()}),
            **({} if self.timeline is None else {TIMELINE: self.timeline.settle()}),
            SHOWN: list(shown),
            DIAGNOSED: self.updater.diagnostics if due else {},
        }

    def restore(self, snapshot: TrainState, meta: dict[str, Any]) -> None:
        """Restores values of `snapshot` and `meta`."""
        self.updater.load_snapshot(snapshot)
        self.experience.restore(meta)
        if self.queue is not None:
            self.queue.load(meta["queue"])
        if self.ahead is not None:
            self.ahead.restore(meta.get(AHEAD, ()))
        if self.timeline is not None:
            self.timeline.count = meta.get(TIMELINE, 0)
        self._trained_on = [Sample(**each) for each in meta.get(SHOWN, ())]
        self.updater.diagnostics = meta.get(DIAGNOSED, {})

    @property
    def held_out_size(self) -> int:
        """Number of held-out tasks that are evaluated."""
        return self.experience.held_out_size

    def measure(self, number: int) -> dict[str, float]:
        """Evaluates on the held-out tasks, and logs samples of them and of the step."""
        self.settle()
        with told(self.tell, "evaluate", {"step": number}):
            evaluation = self.evaluate()
        shown = _samples("eval", evaluation.groups, self.config.log_eval_samples)
        self._samples.write(number, [*shown, *self._trained_on])
        answers = [each.episodes[0] for each in evaluation.groups]
        rows = {"evaluations.jsonl": evaluation_row(number, answers)}
        if self.updater.diagnostics:
            rows["diagnostics.jsonl"] = {"step": number, **self.updater.diagnostics}
        for name, log in self._logs.items():
            log.append([rows[name]] if name in rows else [])
        graded = self._graded(lambda: self.graders.evaluated(answers))
        return _evaluated(evaluation) | graded


def _tell_published(tell: Tell, version: int, size: int, seconds: float) -> None:
    fields = {"version": version, "bytes": int(size), "seconds": round(seconds, 6)}
    tell("publish", fields)


def _evaluated(evaluation: Evaluation) -> dict[str, float]:
    scores = evaluation.scores
    parts = {f"eval/{name}": value for name, value in scores.metrics.items()}
    low, high = scores.interval
    return parts | {
        ACCURACY: scores.accuracy,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/reward": scores.mean_reward,
        "eval/failed": float(scores.failed),
        "eval/truncated_fraction": 1.0 - scores.stopped,
        "time/eval": evaluation.seconds,
    }


def _samples(
    split: Any,
    groups: Sequence[Group],
    count: int,
    is_trained: Callable[[Episode], bool] = lambda _: False,
) -> list[Sample]:
    episodes = [episode for group in groups for episode in group.episodes]
    return [
        Sample(
            split=split,
            task_id=str(episode.task_id),
            sample_index=episode.sample_index,
            prompt=episode.prompt_text,
            completion=episode.transcript,
            reward=float("nan") if episode.reward is None else episode.reward,
            finish_reason=episode.finish_reason,
            error=episode.error,
            conversation=conversation(episode, trained=is_trained(episode)),
            tokens=episode.num_sampled,
        )
        for episode in episodes[:count]
    ]
