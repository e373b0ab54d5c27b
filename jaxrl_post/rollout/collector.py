"""Carries out episodes: sampling here, judging in worker processes.

One round of `Collector.poll` starts a burst of decoding, applies judgements while the
device works, and collects the burst. Any number of episodes may be under way; they can
be suspended, written into a checkpoint, and go on under other parameters.
"""

import concurrent.futures
import contextlib
import dataclasses
import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxrl_post.envs.env import Message, Step, Task
from jaxrl_post.envs.workers.pool import Outcome
from jaxrl_post.rollout import flight as flights
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.flight import Flight, Limits
from jaxrl_post.sampler.requests import Completion, Request, SampleId, SamplingParams
from jaxrl_post.tokens import Tokens

__all__ = [
    "Codec",
    "Collector",
    "Judges",
    "RolloutTimeoutError",
    "Sampler",
    "SeveralTurnsError",
]


type _Judgement = concurrent.futures.Future[Outcome]


class RolloutTimeoutError(RuntimeError):
    """The episodes of a step did not finish before the deadline."""


class SeveralTurnsError(ValueError):
    """An environment goes on after the one turn that an episode may have."""


@runtime_checkable
class Sampler(Protocol):
    """What the collector needs of a sampler; its parameters are bound already."""

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        ...

    def submit(self, request: Request) -> None:
        """Queues a request."""
        ...

    def dispatch(self) -> None:
        """Starts a burst of work, if none is under way; does not wait for it."""
        ...

    def collect(self) -> list[Completion]:
        """Waits for the burst under way, a bounded time; returns what finished."""
        ...

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Ends samples where they are (all for None); returns what they have."""
        ...


@runtime_checkable
class Judges(Protocol):
    """Worker processes in which an environment answers turns, under a deadline."""

    def submit(
        self, task: Task, conversation: tuple[Message, ...], session: SampleId
    ) -> concurrent.futures.Future[Outcome]:
        """Asks for the answer to the turn that ends a conversation."""
        ...

    def end(self, session: SampleId) -> None:
        """Closes the session of an episode that is over, if it has one."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Text and tokens, as the collector needs them."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens of a conversation up to the assistant's turn."""
        ...

    def reply(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        *,
        stop_id: int | None,
    ) -> tuple[int, ...]:
        """Tokens from the assistant's turn, which may lack its end, to its next one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens."""
        ...


@dataclass
class _Open:
    """A group whose episodes are not all over."""

    sampling: SamplingParams
    flights: dict[int, Flight]
    # Whether its samples are with the sampler: not before the first round, and not
    # after a suspension.
    submitted: bool = False
    unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = sum(f.awaits != "nobody" for f in self.flights.values())


@dataclass
class Collector:
    """Any number of episodes under way.

    Attributes:
        codec: text and tokens.
        judges: the environment, in worker processes.
        limits: of an episode.
        deadline_s: seconds that one call of `run` may take.
        grace_s: seconds for which a round waits for the next judgement of those that
            the round before asked for, while the device decodes. If each comes within
            it, what happens is a function of the samples and not of the clock. One that
            takes longer is waited for once, and taken when it comes.
        seconds: time spent by phase, "rollout" and "reward"; the caller may reset it.
    """

    codec: Codec
    judges: Judges
    limits: Limits
    deadline_s: float = 3600.0
    grace_s: float = 0.0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"rollout": 0.0, "reward": 0.0}
    )
    _open: dict[int, _Open] = field(default_factory=dict, init=False)
    # In the order of asking.
    _judging: dict[int, SampleId] = field(default_factory=dict, init=False)
    # Those of them whose time of grace is not over.
    _due: set[int] = field(default_factory=set, init=False)
    _asked: int = field(default=0, init=False)
    # Judgements arrive here as they are made, from the threads of the workers.
    _arrived: queue.SimpleQueue[tuple[int, _Judgement]] = field(
        default_factory=queue.SimpleQueue, init=False
    )

    @property
    def in_flight(self) -> int:
        """Groups that are not finished."""
        return len(self._open)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Of the groups that are not finished, the oldest first."""
        return tuple(self._open)

    def run(
        self,
        sampler: Sampler,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> list[Group]:
        """Carries out every task's episodes to their end.

        Args:
            sampler: with its parameters bound.
            tasks: (prompt id, task); the ids differ.
            num_samples: episodes of each task.
            sampling: for every turn.

        Returns:
            One group a task, in the order of `tasks`. An episode whose judgement failed
            has reward None.

        Raises:
            RolloutTimeoutError: the deadline passed; says what it waited for.
            SeveralTurnsError: the limit is one turn, and the environment goes on.
        """
        self.start(tasks, num_samples, sampling)
        wanted = [prompt_id for prompt_id, _ in tasks]
        done: dict[int, Group] = {}
        deadline = time.monotonic() + self.deadline_s
        while len(done) < len(wanted):
            done |= {group.prompt_id: group for group in self.poll(sampler, deadline)}
        return [done[prompt_id] for prompt_id in wanted]

    def start(
        self,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> None:
        """Begins episodes; the next `poll` asks the sampler for them."""
        for prompt_id, task in tasks:
            if prompt_id in self._open:
                raise ValueError(
                    f"start: a group has the prompt id {prompt_id} already"
                )
            prompt = Tokens.context(self.codec.render(task.messages))
            begun = {
                index: flights.begin(prompt_id, index, task, prompt)
                for index in range(num_samples)
            }
            self._open[prompt_id] = _Open(sampling, begun)

    def poll(self, sampler: Sampler, deadline: float) -> list[Group]:
        """Does one round of work.

        Args:
            sampler: with its parameters bound.
            deadline: value of `time.monotonic` after which nothing is waited for.

        Returns:
            The groups that finished, in the order of their start.

        Raises:
            RolloutTimeoutError: the deadline has passed.
            SeveralTurnsError: the limit is one turn, and the environment goes on.
        """
        self._check(deadline)
        self._submit(sampler)
        begin = time.perf_counter()
        if sampler.busy:
            sampler.dispatch()
        dispatched = time.perf_counter()
        self._take_judgements(sampler, deadline)
        judged = time.perf_counter()
        for completion in sampler.collect():
            self._completed(completion)
        end = time.perf_counter()
        self.seconds["rollout"] += (dispatched - begin) + (end - judged)
        self.seconds["reward"] += judged - dispatched
        return self._finished()

    def suspend(self, sampler: Sampler) -> None:
        """Takes all samples back from the sampler, with the tokens that they have.

        The next `poll` has them go on, perhaps under other parameters: each token says
        which sampled it. Judgements that were asked for are not disturbed.
        """
        for completion in sampler.cancel():
            self._completed(completion)
        for group in self._open.values():
            group.submitted = False

    def state(self) -> list[dict[str, Any]]:
        """A JSON value from which `restore` takes up the groups under way.

        Call `suspend` first: tokens that are still with the sampler are not in it.
        """
        return [
            {
                "prompt_id": prompt_id,
                "sampling": dataclasses.asdict(group.sampling),
                "flights": [each.to_json() for each in group.flights.values()],
            }
            for prompt_id, group in self._open.items()
        ]

    def restore(
        self, value: Sequence[Mapping[str, Any]], tasks: Mapping[int, Task]
    ) -> None:
        """Takes up what `state` gave, in the place of what is under way.

        A judgement that was awaited is asked for again.

        Args:
            value: of `state`.
            tasks: of the groups, by prompt id.

        Raises:
            ChangedTaskError: a task is not the one that an episode began with.
        """
        self._open, self._judging, self._due = {}, {}, set()
        for group in value:
            task = tasks[group["prompt_id"]]
            found = [Flight.from_json(each, task) for each in group["flights"]]
            self._open[group["prompt_id"]] = _Open(
                SamplingParams(**_tuples(group["sampling"])),
                {each.episode.sample_index: each for each in found},
            )
        for prompt_id, opened in self._open.items():
            for index, each in opened.flights.items():
                if each.awaits == "environment":
                    self._ask((prompt_id, index))

    def _submit(self, sampler: Sampler) -> None:
        """Asks for the samples of groups that are new or were suspended."""
        for prompt_id, group in self._open.items():
            if group.submitted:
                continue
            group.submitted = True
            effects = {
                index: effect
                for index, each in group.flights.items()
                if isinstance(effect := flights.effect_of(each), flights.Generate)
            }
            prompts = {effect.prompt for effect in effects.values()}
            new = all(not effect.num_sampled for effect in effects.values())
            if new and len(prompts) == 1 and len(effects) == len(group.flights):
                # One request for the whole group: its prompt is prefilled once.
                request = Request(
                    prompt_id, prompts.pop(), len(effects), 0, group.sampling
                )
                sampler.submit(request)
                continue
            for index, effect in effects.items():
                sampler.submit(_request((prompt_id, index), effect, group.sampling))

    def _completed(self, completion: Completion) -> None:
        sample = completion.prompt_id, completion.sample_index
        if completion.finish_reason == "cancelled":
            # It is not asked for again here: that is for the next round.
            self._advance(sample, flights.Interrupted(completion.tokens))
            return
        partial = self._open[sample[0]].flights[sample[1]].partial
        ids = (partial + completion.tokens).ids.tolist()
        # Not every tokenizer takes its stop tokens for special ones.
        said = ids[: -1 if completion.finish_reason == "stop" else None]
        text = self.codec.decode(said)
        self._advance(
            sample,
            flights.Generated(completion.tokens, text, completion.finish_reason),
        )
        self._ask(sample)

    def _advance(self, sample: SampleId, event: flights.Event) -> flights.Effect:
        group = self._open[sample[0]]
        flight, effect = flights.transition(
            group.flights[sample[1]], event, self.limits
        )
        group.flights[sample[1]] = flight
        if flight.awaits == "nobody":
            group.unfinished -= 1
            self.judges.end(sample)
        return effect

    def _ask(self, sample: SampleId) -> None:
        """Asks the environment about the last turn."""
        flight = self._open[sample[0]].flights[sample[1]]
        number, self._asked = self._asked, self._asked + 1
        self._judging[number] = sample
        self._due.add(number)
        future = self.judges.submit(flight.task, flight.conversation, sample)
        future.add_done_callback(lambda done: self._arrived.put((number, done)))

    def _take_judgements(self, sampler: Sampler, deadline: float) -> None:
        """Applies the judgements that are there, and waits for those that are due.

        All of them were asked for in earlier rounds.
        """
        ready = self._arrivals(time.monotonic())
        if self.grace_s:
            while not self._due <= ready.keys():
                # Anew after each arrival: many quick judgements are not slow ones.
                grace = min(time.monotonic() + self.grace_s, deadline)
                if not (more := self._arrivals(grace)):
                    break
                ready |= more
            self._due.clear()
        if not ready and self._judging and not sampler.busy:
            # Nothing decodes, so nothing goes on without a judgement.
            ready = self._arrivals(deadline)
        # In the order of asking, so that a replay makes the same requests.
        for number in sorted(ready):
            self._due.discard(number)
            sample = self._judging.pop(number)
            self._judged(sample, ready[number].result(timeout=0), sampler)

    def _arrivals(self, until: float) -> dict[int, _Judgement]:
        """Judgements that have arrived; waits for one, at most until then."""
        found: dict[int, _Judgement] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                left = 0.0 if found else max(0.0, until - time.monotonic())
                number, judgement = self._arrived.get(timeout=left)
                # One that was asked for before `restore` is nobody's.
                if number in self._judging:
                    found[number] = judgement
        return found

    def _judged(self, sample: SampleId, outcome: Outcome, sampler: Sampler) -> None:
        group, step = self._open[sample[0]], outcome.step
        flight = group.flights[sample[1]]
        if step is None:
            self._advance(sample, flights.Failed(f"{outcome.kind}: {outcome.error}"))
            return
        if not step.done and self.limits.max_turns == 1:
            # Cut here, the episode would count as one that earned nothing.
            raise SeveralTurnsError(
                f"--env: task {flight.task.id} goes on after its first turn (Step.done "
                "is False), and an episode may have one; raise --rollout.max-turns (in "
                "launch.evaluate --max-turns) to the most turns that it may have"
            )
        effect = self._advance(sample, self._with_reply(flight, step))
        if isinstance(effect, flights.Generate):
            sampler.submit(_request(sample, effect, group.sampling))

    def _with_reply(self, flight: Flight, step: Step) -> flights.Judged:
        """The event of a judgement, with a reply only if a turn follows it."""
        reply: tuple[int, ...] = ()
        if step.messages and flights.has_turns_left(flight, step, self.limits):
            reply = self.codec.reply(
                flight.conversation, step.messages, stop_id=flight.stop_id
            )
        return flights.Judged(step, reply)

    def _finished(self) -> list[Group]:
        done = [i for i, group in self._open.items() if not group.unfinished]
        return [Group(i, _episodes(self._open.pop(i))) for i in done]

    def _check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            missing = sum(group.unfinished for group in self._open.values())
            raise RolloutTimeoutError(
                f"rollout: {missing} episodes were not finished after "
                f"{self.deadline_s:g} s, {len(self._judging)} of them waiting for a "
                "reward; raise the rollout deadline or lower max_tokens"
            )


def _episodes(group: _Open) -> tuple[Episode, ...]:
    return tuple(group.flights[index].episode for index in sorted(group.flights))


def _request(
    sample: SampleId, effect: flights.Generate, sampling: SamplingParams
) -> Request:
    left = dataclasses.replace(
        sampling, max_tokens=sampling.max_tokens - effect.num_sampled
    )
    return Request(sample[0], effect.prompt, 1, sample[1], left, effect.num_sampled)


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
