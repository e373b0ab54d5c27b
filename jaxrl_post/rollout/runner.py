"""Carries out the effects of episodes: sampling here, judging in worker processes.

The host loop alternates between a bounded burst of decoding and looking at the judges;
rewards are computed while other samples still decode.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxrl_post.envs.env import Message, Step, Task
from jaxrl_post.envs.workers import Outcome
from jaxrl_post.rollout import machine
from jaxrl_post.rollout.types import Generator, Group, Rollout
from jaxrl_post.sampler.requests import Request, SamplingParams

__all__ = ["Judges", "RolloutTimeoutError", "Runner", "SeveralTurnsError"]

type Key = tuple[int, int]


class RolloutTimeoutError(RuntimeError):
    """The episodes of a step did not finish before the deadline."""


class SeveralTurnsError(ValueError):
    """An environment goes on after the one turn that an episode may have."""


@runtime_checkable
class Judges(Protocol):
    """Worker processes that run an environment's `step` under a deadline."""

    def submit(
        self, task: Task, conversation: tuple[Message, ...]
    ) -> concurrent.futures.Future[Outcome]:
        """Asks for a judgement."""
        ...


@runtime_checkable
class Codec(Protocol):
    """Text and tokens, as the runner needs them."""

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
class Runner:
    """Runs episodes to their end.

    Attributes:
        codec: text and tokens.
        judges: the environment, in worker processes.
        limits: of an episode.
        deadline_s: seconds that one call of `run` may take.
        seconds: time spent by phase, "rollout" and "reward"; the caller may reset it.
    """

    codec: Codec
    judges: Judges
    limits: machine.Limits
    deadline_s: float = 3600.0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"rollout": 0.0, "reward": 0.0}
    )

    def run(
        self,
        generator: Generator,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> list[Group]:
        """Samples every task `num_samples` times and has the samples judged.

        Args:
            generator: a sampler with its parameters bound.
            tasks: (prompt id, task); the ids differ.
            num_samples: of each task.
            sampling: for every turn.

        Returns:
            One group a task, in the order of `tasks`. A rollout whose judgement failed
            has reward None.

        Raises:
            RolloutTimeoutError: the deadline passed; says what it waited for.
            SeveralTurnsError: the limit is one turn, and the environment goes on.
        """
        episodes: dict[Key, machine.Episode] = {}
        judging: dict[concurrent.futures.Future[Outcome], Key] = {}
        done: dict[Key, Rollout] = {}
        deadline = time.monotonic() + self.deadline_s

        def carry_out(key: Key, effect: machine.Effect) -> None:
            match effect:
                case machine.Generate(prompt):
                    generator.submit(Request(key[0], prompt, 1, key[1], sampling))
                case machine.Judge(conversation):
                    future = self.judges.submit(episodes[key].task, conversation)
                    judging[future] = key
                case machine.Finish(rollout):
                    done[key] = rollout

        def advance(key: Key, event: machine.Event) -> None:
            episodes[key], effect = machine.transition(
                episodes[key], event, self.limits
            )
            carry_out(key, effect)

        for prompt_id, task in tasks:
            prompt = self.codec.render(task.messages)
            # One request for the whole group: its prompt is prefilled once.
            generator.submit(Request(prompt_id, prompt, num_samples, 0, sampling))
            for index in range(num_samples):
                episodes[prompt_id, index], _ = machine.begin(
                    prompt_id, index, task, prompt
                )
        while len(done) < len(episodes):
            self._check(deadline, len(episodes) - len(done), len(judging))
            self._decode(generator, advance)
            self._collect(judging, generator.busy, deadline, advance, episodes)
        return [
            Group(prompt_id, tuple(done[prompt_id, i] for i in range(num_samples)))
            for prompt_id, _ in tasks
        ]

    def _check(self, deadline: float, missing: int, judging: int) -> None:
        if time.monotonic() > deadline:
            raise RolloutTimeoutError(
                f"rollout: {missing} episodes were not finished after "
                f"{self.deadline_s:g} s, {judging} of them waiting for a reward; raise "
                "the rollout deadline or lower max_tokens"
            )

    def _decode(
        self, generator: Generator, advance: Callable[[Key, machine.Event], None]
    ) -> None:
        if not generator.busy:
            return
        begin = time.perf_counter()
        for completion in generator.step():
            key = (completion.prompt_id, completion.sample_index)
            # Not every tokenizer takes its stop tokens for special ones.
            said = completion.tokens[
                : -1 if completion.finish_reason == "stop" else None
            ]
            text = self.codec.decode(said)
            advance(key, machine.Generated(completion, text))
        self.seconds["rollout"] += time.perf_counter() - begin

    def _collect(
        self,
        judging: dict[concurrent.futures.Future[Outcome], Key],
        busy: bool,
        deadline: float,
        advance: Callable[[Key, machine.Event], None],
        episodes: dict[Key, machine.Episode],
    ) -> None:
        """Takes the judgements that are there; waits for one if nothing decodes."""
        if not judging:
            return
        begin = time.perf_counter()
        ready, _ = concurrent.futures.wait(
            judging,
            timeout=0 if busy else max(0.0, deadline - time.monotonic()),
            return_when=concurrent.futures.FIRST_COMPLETED,
        )
        # In the order of submission, so that a replay makes the same requests.
        for future in [f for f in judging if f in ready]:
            key, outcome = judging.pop(future), future.result(timeout=0)
            if outcome.step is None:
                advance(key, machine.Failed(f"{outcome.kind}: {outcome.error}"))
                continue
            if not outcome.step.done and self.limits.max_turns == 1:
                # Cut here, the episode would count as one that earned nothing.
                raise SeveralTurnsError(
                    f"--env: task {episodes[key].task.id} goes on after its first "
                    "turn (Step.done is False), and the programs carry out one turn a "
                    "task; use an environment whose first step is its last"
                )
            advance(key, self._judged(episodes[key], outcome.step))
        self.seconds["reward"] += time.perf_counter() - begin

    def _judged(self, episode: machine.Episode, step: Step) -> machine.Judged:
        """The event of a judgement, with a reply only where a turn follows it."""
        reply: tuple[int, ...] = ()
        if step.messages and machine.has_turns_left(episode, step, self.limits):
            reply = self.codec.reply(
                episode.conversation, step.messages, stop_id=episode.stop_id
            )
        return machine.Judged(step, reply)
