"""Runs episodes: samples turns in this process, judges them in worker processes.

One round of `Collector.poll` starts a burst of decoding, applies judgements while the
device decodes, and collects the burst. Unfinished episodes can be suspended, written
into a checkpoint, and continued under other parameters.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxrl_post.data.chat import RewrittenError
from jaxrl_post.data.replies import Reply
from jaxrl_post.data.tokenizer import TextError, TokenizerError
from jaxrl_post.envs.env import Answer, Message, Step, Task, ToolCall
from jaxrl_post.envs.workers.pool import Outcome
from jaxrl_post.rollout import flight as flights
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.rollout.flight import Flight, Limits
from jaxrl_post.rollout.judgements import Judgements, Judges
from jaxrl_post.sampler.requests import Completion, Request, SampleId, SamplingParams
from jaxrl_post.tokens import Tokens

__all__ = [
    "Codec",
    "Collector",
    "RolloutTimeoutError",
    "Sampler",
    "SeveralTurnsError",
]


class RolloutTimeoutError(RuntimeError):
    """The episodes of a step did not finish before the deadline."""


class SeveralTurnsError(ValueError):
    """The environment continues an episode that may have only one turn."""


@runtime_checkable
class Sampler(Protocol):
    """The sampler as the collector uses it, with parameters already bound."""

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        ...

    def submit(self, request: Request) -> None:
        """Queues a request."""
        ...

    def dispatch(self) -> None:
        """Starts bursts of decoding, at most two; does not wait for them."""
        ...

    def collect(self) -> list[Completion]:
        """Waits for the first burst, a bounded time; returns finished completions."""
        ...

    def settle(self) -> list[Completion]:
        """Waits for all bursts, so that the parameters may change."""
        ...

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Converts between text and tokens, as the collector needs it."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Tokens of a conversation up to the start of the assistant's next turn."""
        ...

    def reply(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        stop_id: int | None,
    ) -> tuple[int, ...]:
        """Tokens between the last sampled token and the assistant's next turn."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens."""
        ...

    def read(
        self,
        prompt: Sequence[int],
        said: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """The parts of an answer to a task with tools."""
        ...


@runtime_checkable
class EpisodeCollector(Protocol):
    """What carries out the episodes of a run, any number at the same time.

    `Collector` samples turn by turn itself; `serve.agents.AgentCollector` answers
    programs that ask for turns.

    Attributes:
        seconds: time spent by phase, "rollout" and "reward"; the caller may reset it.
    """

    seconds: dict[str, float]

    @property
    def in_flight(self) -> int:
        """Number of unfinished groups."""
        ...

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt ids of the unfinished groups, the oldest first."""
        ...

    def apart(self) -> "EpisodeCollector":
        """A collector of the same kind without episodes."""
        ...

    def run(
        self,
        sampler: Any,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> list[Group]:
        """Runs the episodes of all tasks until they end."""
        ...

    def start(
        self,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> None:
        """Starts episodes."""
        ...

    def poll(self, sampler: Any, deadline: float) -> list[Group]:
        """Runs one round; returns the groups that finished."""
        ...

    def pause(self, sampler: Any) -> None:
        """Waits for the device; the samples stay in the sampler."""
        ...

    def suspend(self, sampler: Any) -> None:
        """Takes all samples back from the sampler."""
        ...

    def state(self) -> list[dict[str, Any]]:
        """The unfinished groups as a JSON value for `restore`."""
        ...

    def restore(
        self, value: Sequence[Mapping[str, Any]], tasks: Mapping[int, Task]
    ) -> None:
        """Replaces the unfinished groups with those of `state`."""
        ...


@dataclass
class _Open:
    """A group with unfinished episodes."""

    sampling: SamplingParams
    flights: dict[int, Flight]
    # Whether the sampler has the group's samples: False before the first round and
    # after a suspension.
    submitted: bool = False
    unfinished: int = field(init=False)

    def __post_init__(self) -> None:
        self.unfinished = sum(f.awaits != "nobody" for f in self.flights.values())


@dataclass
class Collector:
    """Runs any number of episodes at the same time.

    Attributes:
        codec: converts between text and tokens.
        judges: the environment, in worker processes.
        limits: bounds of an episode.
        deadline_s: maximum seconds of one call of `run`.
        grace_s: seconds that a round waits for each judgement requested in the previous
            round, while the device decodes. If no judgement takes longer, the results
            depend only on the samples, not on the clock. After one that takes longer,
            the round waits no more; late judgements are applied when they arrive.
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
    _judgements: Judgements = field(init=False)

    def __post_init__(self) -> None:
        self._judgements = Judgements(self.judges)

    @property
    def in_flight(self) -> int:
        """Number of unfinished groups."""
        return len(self._open)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt ids of the unfinished groups, the oldest first."""
        return tuple(self._open)

    def apart(self) -> "Collector":
        """A collector of the same kind without episodes, which never waits in vain."""
        return Collector(self.codec, self.judges, self.limits, self.deadline_s)

    def run(
        self,
        sampler: Sampler,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> list[Group]:
        """Runs the episodes of all tasks until they end.

        Args:
            sampler: with parameters bound.
            tasks: (prompt id, task); the prompt ids must be distinct.
            num_samples: number of episodes per task.
            sampling: the sampling parameters of every turn.

        Returns:
            One group per task, in the order of `tasks`. An episode whose judgement
            failed has reward None.

        Raises:
            RolloutTimeoutError: the deadline passed.
            SeveralTurnsError: the limit is one turn, but the environment continues.
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
        """Starts episodes; the next `poll` submits them to the sampler."""
        for prompt_id, task in tasks:
            if prompt_id in self._open:
                raise ValueError(
                    f"start: a group has the prompt id {prompt_id} already"
                )
            prompt = Tokens.context(self.codec.render(task.messages, task.tools))
            begun = {
                index: flights.begin(prompt_id, index, task, prompt)
                for index in range(num_samples)
            }
            self._open[prompt_id] = _Open(sampling, begun)

    def poll(self, sampler: Sampler, deadline: float) -> list[Group]:
        """Runs one round: dispatches bursts, applies judgements, collects the first.

        Args:
            sampler: with parameters bound.
            deadline: value of `time.monotonic` at which the round stops waiting.

        Returns:
            The groups that finished, in the order of their start.

        Raises:
            RolloutTimeoutError: the deadline has passed.
            SeveralTurnsError: the limit is one turn, but the environment continues.
        """
        self._check(deadline)
        self._submit(sampler)
        begin = time.perf_counter()
        if sampler.busy:
            sampler.dispatch()
        dispatched = time.perf_counter()
        for sample, outcome in self._judgements.take(
            deadline, grace_s=self.grace_s, idle=not sampler.busy
        ):
            self._judged(sample, outcome, sampler)
        judged = time.perf_counter()
        for completion in sampler.collect():
            self._completed(completion)
        end = time.perf_counter()
        self.seconds["rollout"] += (dispatched - begin) + (end - judged)
        self.seconds["reward"] += judged - dispatched
        return self._finished()

    def pause(self, sampler: Sampler) -> None:
        """Waits for the device; the samples stay where they are in the sampler.

        The next `poll` continues them, possibly under other parameters. The sampler
        says whether their kept keys and values are computed again.
        """
        for completion in sampler.settle():
            self._completed(completion)

    def suspend(self, sampler: Sampler) -> None:
        """Takes all samples back from the sampler, with their tokens so far.

        The next `poll` continues them, possibly under other parameters: each token
        records the version that sampled it. Requested judgements are not affected.
        """
        for completion in sampler.cancel():
            self._completed(completion)
        for group in self._open.values():
            group.submitted = False

    def state(self) -> list[dict[str, Any]]:
        """The unfinished groups as a JSON value for `restore`.

        Call `suspend` first: tokens that only the sampler holds are not included.
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
        """Replaces the unfinished groups with those of `state`.

        Judgements that were pending are requested again.

        Args:
            value: a result of `state`.
            tasks: the tasks of the groups, by prompt id.

        Raises:
            ChangedTaskError: a task differs from the one that its episodes began with.
        """
        self._open = {}
        self._judgements.forget()
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
        """Submits the samples of groups that are new or were suspended."""
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
            # The next round submits the sample again.
            self._advance(sample, flights.Interrupted(completion.tokens))
            return
        flight = self._open[sample[0]].flights[sample[1]]
        ids = (flight.partial + completion.tokens).ids.tolist()
        # `decode` drops special tokens, but not every stop token is a special token.
        said = ids[: -1 if completion.finish_reason == "stop" else None]
        event = flights.Generated(
            completion.tokens, self.codec.decode(said), completion.finish_reason
        )
        if flight.task.tools:
            prompt = flight.context.ids[-8:].tolist()
            reply = self.codec.read(prompt, said, flight.task.tools)
            event = dataclasses.replace(
                event, message=_message(flight, reply), broken_calls=reply.broken
            )
        self._advance(sample, event)
        if completion.finish_reason == "failed":
            self._advance(sample, flights.Failed(f"sampler: {completion.error}"))
            return
        self._ask(sample)

    def _advance(self, sample: SampleId, event: flights.Event) -> flights.Effect:
        group = self._open[sample[0]]
        flight, effect = flights.transition(
            group.flights[sample[1]], event, self.limits
        )
        group.flights[sample[1]] = flight
        if flight.awaits == "nobody":
            group.unfinished -= 1
            self._judgements.end(sample)
        return effect

    def _ask(self, sample: SampleId) -> None:
        """Requests the judgement of the last turn."""
        flight = self._open[sample[0]].flights[sample[1]]
        self._judgements.request(flight.task, flight.conversation, sample)

    def _judged(self, sample: SampleId, outcome: Outcome, sampler: Sampler) -> None:
        group, step = self._open[sample[0]], outcome.step
        flight = group.flights[sample[1]]
        if step is None:
            self._advance(sample, flights.Failed(f"{outcome.kind}: {outcome.error}"))
            return
        if not step.done and self.limits.max_turns == 1:
            # Otherwise the episode would end here and count as one without reward.
            raise SeveralTurnsError(
                f"--env: task {flight.task.id} goes on after its first turn (Step.done "
                "is False), and an episode may have one; raise --rollout.max-turns (in "
                "launch.evaluate --max-turns) to the most turns that it may have"
            )
        try:
            event = self._with_reply(flight, step)
        except TextError as error:
            # Of this reply alone: the environment may quote what the policy said.
            event = flights.Failed(f"reply: {error}")
        except TokenizerError as error:
            if not flight.task.tools:
                raise
            # What the policy said may be what the template refuses.
            event = flights.Failed(f"tools: {error}")
        effect = self._advance(sample, event)
        if isinstance(effect, flights.Generate):
            sampler.submit(_request(sample, effect, group.sampling))

    def _with_reply(self, flight: Flight, step: Step) -> flights.Judged:
        """The event of a judgement, with a reply only if another turn follows."""
        if not step.messages or not flights.has_turns_left(flight, step, self.limits):
            return flights.Judged(step)
        tools = flight.task.tools
        try:
            reply = self.codec.reply(
                flight.conversation, step.messages, tools, stop_id=flight.stop_id
            )
        except RewrittenError:
            # As a server would write it that is sent the messages.
            messages = (*self._as_read(flight), *step.messages)
            return flights.Judged(step, self.codec.render(messages, tools), anew=True)
        return flights.Judged(step, reply)

    def _as_read(self, flight: Flight) -> list[Message]:
        """The conversation, each answer in the parts of which templates write some."""
        turns, messages = iter(flight.episode.turns), []
        for message in flight.conversation:
            if isinstance(message, Answer):
                turn = next(turns)
                ids = turn.sampled.ids.tolist()
                said = ids[: -1 if turn.finish_reason == "stop" else None]
                reply = self.codec.read(turn.context.ids[-8:].tolist(), said)
                if reply.reasoning is not None and not reply.calls:
                    message = Message(
                        "assistant", reply.content, reasoning=reply.reasoning
                    )
            messages.append(message)
        return messages

    def _finished(self) -> list[Group]:
        done = [i for i, group in self._open.items() if not group.unfinished]
        return [Group(i, _episodes(self._open.pop(i))) for i in done]

    def _check(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            missing = sum(group.unfinished for group in self._open.values())
            raise RolloutTimeoutError(
                f"rollout: {missing} episodes were not finished after "
                f"{self.deadline_s:g} s, {len(self._judgements)} of them waiting for a "
                "reward; raise the rollout deadline or lower max_tokens"
            )


def _episodes(group: _Open) -> tuple[Episode, ...]:
    return tuple(group.flights[index].episode for index in sorted(group.flights))


def _message(flight: Flight, reply: Reply) -> Message:
    """The answer, with a name for each call: nine digits, as Mistral's templates want.

    Names are places in the episode, so a session that is replayed hears the same.
    """
    turn = len(flight.episode.turns)
    named = [
        ToolCall(call.name, call.arguments, f"{turn:04d}{place:05d}")
        for place, call in enumerate(reply.calls)
    ]
    return Message(
        "assistant",
        reply.content,
        reasoning=reply.reasoning,
        tool_calls=tuple(named),
    )


def _request(
    sample: SampleId, effect: flights.Generate, sampling: SamplingParams
) -> Request:
    left = dataclasses.replace(
        sampling, max_tokens=sampling.max_tokens - effect.num_sampled
    )
    return Request(sample[0], effect.prompt, 1, sample[1], left, effect.num_sampled)


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
