"""Episodes of our own dialogue: samples a turn, has it judged, samples the next."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxrl_post.data.chat import RewrittenError
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.replies import Reply
from jaxrl_post.data.tokenizer import TextError, TokenizerError
from jaxrl_post.envs.env import Answer, Message, Step, Task, ToolCall
from jaxrl_post.envs.workers.pool import Judgement
from jaxrl_post.pictures import PictureError
from jaxrl_post.rollout import flight as flights
from jaxrl_post.rollout.episode import Episode
from jaxrl_post.rollout.flight import EpisodeLimits, Flight
from jaxrl_post.rollout.judgements import Judgements, Judges
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import Completion, Request, SampleId, SamplingParams
from jaxrl_post.tokens import Tokens

__all__ = ["Dialogue", "SeveralTurnsError"]


class SeveralTurnsError(ValueError):
    """The environment continues an episode that may have only one turn."""


@dataclass
class _Running:
    """The unfinished episodes of a group.

    Attributes:
        sampling: of every turn.
        count: episodes of the whole group.
        flights: of the unfinished episodes, by sample index.
        submitted: whether the sampler has their samples: False before the first round
            and after a suspension.
    """

    sampling: SamplingParams
    count: int
    flights: dict[int, Flight]
    submitted: bool = False


@dataclass
class Dialogue:
    """Runs episodes turn by turn in this process; an `EpisodeSource` of the collector.

    A round starts a burst of decoding, applies judgements while the device decodes, and
    collects the burst.

    Attributes:
        codec: converts between text and tokens.
        judges: the environment, in worker processes.
        limits: bounds of an episode.
        grace_s: seconds that a round waits for each judgement requested in the previous
            round, while the device decodes. If no judgement takes longer, the results
            depend only on the samples, not on the clock. After one that takes longer,
            the round waits no more; late judgements are applied when they arrive.
        seconds: time spent by phase, "rollout" and "reward"; the caller may reset it.
    """

    codec: Codec
    judges: Judges
    limits: EpisodeLimits
    grace_s: float = 0.0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"rollout": 0.0, "reward": 0.0}
    )
    _groups: dict[int, _Running] = field(default_factory=dict, init=False)
    _ended: list[Episode] = field(default_factory=list, init=False)
    _judgements: Judgements = field(init=False)

    def __post_init__(self) -> None:
        self._judgements = Judgements(self.judges)

    def apart(self) -> "Dialogue":
        """Returns a dialogue without episodes, which waits for no grace."""
        return Dialogue(self.codec, self.judges, self.limits)

    def begin(
        self,
        prompt_id: int,
        task: Task,
        samples: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        """Begins episodes of a task; the next round submits them to the sampler.

        Raises:
            PictureError: a picture of the task cannot be shown; the error names it.
        """
        try:
            rendered = self.codec.render(task.messages, task.tools)
        except PictureError as error:
            raise PictureError(f"--env: task {task.id}: {error}") from error
        prompt = Tokens.context(rendered)
        begun = {i: flights.begin(prompt_id, i, task, prompt) for i in samples}
        self._groups[prompt_id] = _Running(sampling, len(begun), begun)

    def round(self, sampler: Sampler, deadline: float) -> list[Episode]:
        """Dispatches bursts, applies judgements, collects the first burst.

        Raises:
            SeveralTurnsError: the limit is one turn, but the environment continues.
        """
        self._submit(sampler)
        begin = time.perf_counter()
        if sampler.busy:
            sampler.dispatch()
        dispatched = time.perf_counter()
        with jax.profiler.TraceAnnotation("reward"):
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
        ended, self._ended = self._ended, []
        return ended

    def waits(self) -> str:
        """Says what unfinished episodes wait for, for a message."""
        return f"{len(self._judgements)} of them wait for a reward"

    def pause(self, sampler: Sampler) -> None:
        """Waits for the device; the samples stay where they are in the sampler."""
        for completion in sampler.settle():
            self._completed(completion)

    def suspend(self, sampler: Sampler) -> None:
        """Takes all samples back from the sampler, with their tokens so far."""
        for completion in sampler.cancel():
            self._completed(completion)
        for group in self._groups.values():
            group.submitted = False

    def state(self, prompt_id: int) -> list[dict[str, Any]]:
        """Returns the unfinished episodes of a group, each as JSON for `restore`."""
        group = self._groups.get(prompt_id)
        return [] if group is None else [f.to_json() for f in group.flights.values()]

    def forget(self) -> None:
        """Drops all episodes, before `restore`; judgements that arrive are ignored."""
        self._groups, self._ended = {}, []
        self._judgements.forget()

    def restore(
        self,
        prompt_id: int,
        task: Task,
        count: int,
        sampling: SamplingParams,
        saved: Sequence[Mapping[str, Any]],
    ) -> None:
        """Continues the episodes of `state`; asks for pending judgements again.

        Raises:
            ChangedTaskError: the task differs from the one that they began with.
        """
        found = [Flight.from_json(each, task) for each in saved]
        # Checkpoints of earlier versions have finished episodes among them.
        self._ended += [each.episode for each in found if each.awaits == "nobody"]
        running = {
            each.episode.sample_index: each for each in found if each.awaits != "nobody"
        }
        if not running:
            return
        self._groups[prompt_id] = _Running(sampling, count, running)
        for index, each in running.items():
            if each.awaits == "environment":
                self._ask((prompt_id, index))

    def _submit(self, sampler: Sampler) -> None:
        """Submits the samples of groups that are new or were suspended."""
        for prompt_id, group in self._groups.items():
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
            if new and len(prompts) == 1 and len(effects) == group.count:
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
        flight = self._groups[sample[0]].flights[sample[1]]
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
        group = self._groups[sample[0]]
        flight, effect = flights.transition(
            group.flights[sample[1]], event, self.limits
        )
        group.flights[sample[1]] = flight
        if isinstance(effect, flights.Finish):
            self._ended.append(effect.episode)
            self._judgements.end(sample)
            del group.flights[sample[1]]
            if not group.flights:
                del self._groups[sample[0]]
        return effect

    def _ask(self, sample: SampleId) -> None:
        """Requests the judgement of the last turn."""
        flight = self._groups[sample[0]].flights[sample[1]]
        self._judgements.request(flight.task, flight.conversation, sample)

    def _judged(self, sample: SampleId, outcome: Judgement, sampler: Sampler) -> None:
        group, step = self._groups[sample[0]], outcome.step
        flight = group.flights[sample[1]]
        if step is None:
            self._advance(sample, flights.Failed(f"{outcome.kind}: {outcome.error}"))
            return
        if not step.done and self.limits.max_turns == 1:
            # Otherwise the episode would end here and count as one without reward.
            raise SeveralTurnsError(
                f"--env: task {flight.task.id} continues after its first turn "
                "(Step.done is False), and an episode may have one; raise "
                "--rollout.max-turns (launch.evaluate: --max-turns) to the most turns "
                "that it may have"
            )
        try:
            event = self._with_reply(flight, step)
        except (TextError, PictureError) as error:
            # Only this reply failed: the environment may quote the policy, or show
            # what the policy's program drew.
            event = flights.Failed(f"reply: {error}")
        except TokenizerError as error:
            if not flight.task.tools:
                raise
            # The template may refuse the text of the policy.
            event = flights.Failed(f"tools: {error}")
        effect = self._advance(sample, event)
        if isinstance(effect, flights.Generate):
            sampler.submit(_request(sample, effect, group.sampling))

    def _with_reply(self, flight: Flight, step: Step) -> flights.Answered:
        """The event of a judgement, with a reply only if another turn follows."""
        if not step.messages or not flights.has_turns_left(flight, step, self.limits):
            return flights.Answered(step)
        tools = flight.task.tools
        try:
            reply = self.codec.reply(
                flight.conversation, step.messages, tools, stop_id=flight.stop_id
            )
        except RewrittenError:
            # As a server would write it that is sent the messages.
            messages = (*self._as_read(flight), *step.messages)
            return flights.Answered(step, self.codec.render(messages, tools), anew=True)
        return flights.Answered(step, reply)

    def _as_read(self, flight: Flight) -> list[Message]:
        """The conversation, each answer in parts; templates may write only some."""
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
