"""Episodes that agents carry out: programs that call the model over HTTP themselves.

An agent runs in a worker process (`envs.AgentEnvironment`) and knows one thing: the
base URL of its episode. The server is in the process of the trainer; its sampler is
driven by `Agents.round`, in the thread of the trainer, with its own arrays.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.envs.env import BASE_URL, Answer, Step, Task
from jaxrl_post.envs.workers.interface import Judgement
from jaxrl_post.messages import Message, ToolCall
from jaxrl_post.rollout.episode import Episode, EpisodeEnd, Turn
from jaxrl_post.rollout.judgements import Judgements, Judges
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import MOST_FLOAT, SampleId
from jaxrl_post.serve.app import make_app
from jaxrl_post.serve.calls import Served
from jaxrl_post.serve.episodes import Episodes
from jaxrl_post.serve.recordings import KINDS, Recording
from jaxrl_post.serve.threads import serving

__all__ = ["AgentServer", "Agents"]

_LOGGER = logging.getLogger(__name__)

# Name of the reward part that agents post, in addition to an environment's own parts.
POSTED = "posted"
# Seconds for what the server's own thread has to do.
LOOP_S = 60.0
# Why an episode has ended whose run went back to a checkpoint.
STOPPED = "the run was restored from a checkpoint"
# Seconds between two looks at whether a judgement has arrived, while nothing samples.
IDLE_S = 0.01


@dataclass
class AgentServer:
    """The server, in a thread of the trainer's process.

    Attributes:
        served: the model; its service is not started, but pumped by `Agents`.
        episodes: where the episodes are kept.
        url: without a path.
    """

    served: Served
    episodes: Episodes
    url: str
    _loop: asyncio.AbstractEventLoop

    @classmethod
    @contextlib.contextmanager
    def listening(cls, served: Served, host: str, port: int) -> Iterator["AgentServer"]:
        """Serves until the block ends.

        Args:
            served: the model.
            host: to listen on.
            port: to listen on; 0 for a free one.

        Raises:
            OSError: the address is taken.
        """
        episodes = Episodes(most=2**20)
        app = make_app(served, episodes=episodes)
        ending = served.service.abandon
        with serving(app, host, port, name="agents", ending=ending) as (url, loop):
            yield cls(served, episodes, url, loop)

    def keep(self, recording: Recording) -> None:
        """Keeps an episode until it is taken: its agent's deadline bounds it."""
        self.episodes.keep(recording, math.inf)

    def call[Result](self, work: Callable[[], Result]) -> Result:
        """Runs a function in the server's thread, where the recordings belong."""

        async def run() -> Result:
            return work()

        coroutine: Coroutine[Any, Any, Result] = run()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LOOP_S)


@dataclass
class Agents:
    """Episodes that agents run; an `EpisodeSource` of the collector.

    An agent is a program, which no checkpoint can hold: an episode that has not ended
    begins again from its task when a run is resumed. In a run that continues, an agent
    whose call is being answered at the end of a step waits: its tokens so far are kept,
    and parameters of the next step continue them. Deadlines of agents count this time.

    Attributes:
        server: the agents' server.
        judges: the environment, in worker processes, one agent each at a time.
        max_turns: most calls of an episode that are answered.
        seconds: time spent by phase, "rollout" and "reward"; the caller may reset it.
    """

    server: AgentServer
    judges: Judges
    max_turns: int
    seconds: dict[str, float] = field(
        default_factory=lambda: {"rollout": 0.0, "reward": 0.0}
    )
    # The task and the recording's name of each episode that has not ended.
    _running: dict[SampleId, tuple[Task, str]] = field(default_factory=dict, init=False)
    _answers: Judgements = field(init=False)

    def __post_init__(self) -> None:
        self._answers = Judgements(self.judges)

    def apart(self) -> "Agents":
        """Returns agents of the same server, without episodes."""
        return Agents(self.server, self.judges, self.max_turns)

    def begin(
        self,
        prompt_id: int,
        task: Task,
        samples: Sequence[int],
        sampling: SamplingParams,
    ) -> None:
        """Opens episodes, and has their agents started."""
        for index in samples:
            sample = prompt_id, index
            name = _name(sample)
            self._running[sample] = task, name
            recording = Recording(
                name,
                seed=prompt_id << 32 | index,
                sampling=sampling,
                most_turns=self.max_turns,
            )
            self.server.call(lambda kept=recording: self.server.keep(kept))
            url = f"{self.server.url}/episodes/{name}/v1"
            called = dataclasses.replace(task, data={**task.data, BASE_URL: url})
            self._answers.request(called, (), sample)

    def round(self, sampler: Sampler, deadline: float) -> list[Episode]:
        """Samples what agents ask for; returns the episodes of agents that are done."""
        begin = time.perf_counter()
        self.server.served.service.pump(sampler, wait_s=IDLE_S)
        pumped = time.perf_counter()
        ended = [
            self._ended(sample, outcome)
            for sample, outcome in self._answers.take(deadline, grace_s=0.0, idle=False)
        ]
        self.seconds["rollout"] += pumped - begin
        self.seconds["reward"] += time.perf_counter() - pumped
        return ended

    def waits(self) -> str:
        """Says what unfinished episodes wait for, for a message."""
        return (
            f"their {len(self._answers)} agents were not done "
            "(--rollout.reward-deadline-s bounds one agent)"
        )

    def pause(self, sampler: Sampler) -> None:
        """Waits for the device; what is being answered stays in the sampler."""
        del sampler
        self.server.served.service.settle()

    def suspend(self, sampler: Sampler) -> None:
        """Takes what is being answered back from the sampler, with its tokens."""
        del sampler
        self.server.served.service.suspend()

    def state(self, prompt_id: int) -> list[dict[str, Any]]:
        """Returns which episodes of a group have not ended; nothing else of them."""
        return [{"sample_index": i} for at, i in self._running if at == prompt_id]

    def forget(self) -> None:
        """Drops all episodes; what their agents still call is refused."""
        for sample, (_, name) in self._running.items():
            self.server.call(lambda name=name: self.server.episodes.take(name, STOPPED))
            self._answers.end(sample)
        self._running.clear()
        self._answers.forget()

    def restore(
        self,
        prompt_id: int,
        task: Task,
        count: int,
        sampling: SamplingParams,
        saved: Sequence[Mapping[str, Any]],
    ) -> None:
        """Begins the episodes of `state` again, from their task."""
        del count
        _LOGGER.warning(
            "rollout: %d episodes of task %s had not ended at the checkpoint, which "
            "cannot hold their agents; they begin again",
            len(saved),
            task.id,
        )
        samples = [each["sample_index"] for each in saved]
        self.begin(prompt_id, task, samples, sampling)

    def _ended(self, sample: SampleId, outcome: Judgement) -> Episode:
        why = "the agent is done"
        if outcome.kind == "timeout":
            why = "its agent was stopped at --rollout.reward-deadline-s"
        elif outcome.step is None:
            why = f"its agent has failed ({outcome.kind})"
        # A call that is still running, or one of a thread that the agent left, is
        # refused with this reason or, later, because there is no such episode: no later
        # episode has its name.
        task, name = self._running.pop(sample)
        recording = self.server.call(lambda: self.server.episodes.take(name, why))
        self._answers.end(sample)
        return _episode(
            sample, task, recording, outcome, self.server.served.tokenizer.decode
        )


def _name(sample: SampleId) -> str:
    """A name for the URL of an episode, which no other episode has.

    A sample may be run again, in an evaluation or after a run was resumed, while a
    process that an agent left behind still calls the URL that it was given. The noise
    of an episode comes from its seed, never from its name.
    """
    return f"{sample[0]}-{sample[1]}-{secrets.token_hex(8)}"


def _episode(
    sample: SampleId,
    task: Task,
    recording: Recording,
    outcome: Judgement,
    decode: Callable[[Sequence[int]], str],
) -> Episode:
    """Builds an episode from the served turns; each branch is a sequence of its own."""
    turns: list[Turn] = []
    segments: list[int] = []
    most = 0 if recording.sampling is None else recording.sampling.max_tokens
    # The recording's numbers, in the order of serving, to the episode's.
    numbers: dict[int | None, int] = {}
    for branch in recording.branches():
        segments.append(len(turns))
        before = 0
        for number in dict.fromkeys(branch.turns[branch.turns >= 0].tolist()):
            places = (branch.turns == number).nonzero()[0]
            first, last = int(places[0]), int(places[-1]) + 1
            context = branch.tokens[before:first]
            sampled = branch.tokens[first:last]
            served = recording.turns[number]
            # An answer as long as the agent wanted it was not cut off.
            cut = served.finish_reason == "length" and len(sampled) >= most
            reason = "length" if cut else "stop"
            turns.append(
                Turn(
                    context.unsampled,
                    sampled,
                    heard=decode(context.ids.tolist()),
                    text=decode(sampled.ids.tolist()),
                    finish_reason=reason,
                    reward=recording.rewards.get(number, 0.0),
                    messages=tuple(map(_message, served.heard)),
                    said=_answer(served.answer, reason, len(sampled)),
                    branched_from=None if before else numbers.get(served.parent),
                    player=served.player,
                    served=number,
                )
            )
            numbers[number] = len(turns) - 1
            before = last
    text = "\n".join(message.content for message in task.messages)
    episode = Episode(
        *sample, task.id, text, tuple(turns), segments=tuple(segments[1:])
    )
    step, error = outcome.step, ""
    if step is None:
        error = f"{outcome.kind}: {outcome.error}"
    elif not turns:
        error = "the agent ended without a call that was answered"
    else:
        error = _unfair(episode, recording, step)
    if step is None or error:
        return dataclasses.replace(episode, finish_reason="failed", error=error)
    for name, reward in step.players.items():
        at = next(n for n in reversed(episode.order) if turns[n].player == name)
        reward += turns[at].reward or 0.0
        turns[at] = dataclasses.replace(turns[at], reward=reward)
    # A reward of the whole comes after all turns that were served.
    at = episode.order[-1]
    last = turns[at]
    counts = {f"agent_{kind}": float(recording.counts[kind]) for kind in KINDS}
    turns[at] = dataclasses.replace(
        last,
        reward=(last.reward or 0.0) + recording.reward + step.reward,
        rewards=step.rewards and {**step.rewards, **_posted(recording)},
        metrics={**step.metrics, **counts, "agent_turns": float(len(turns))},
    )
    end: EpisodeEnd = "length" if episode.truncated else "stop"
    return dataclasses.replace(episode, turns=tuple(turns), finish_reason=end)


def _posted(recording: Recording) -> dict[str, float]:
    """The posted rewards, as a part in addition to the environment's."""
    posted = recording.reward + sum(recording.rewards.values())
    return {POSTED: posted} if posted else {}


def _unfair(episode: Episode, recording: Recording, step: Step) -> str:
    """Says why rewards cannot be split among an episode's players; "" if they can."""
    players = list(episode.last_turns)
    for name in step.players:
        if not name or name not in players:
            spoke = ", ".join(filter(None, players)) or "no player with a name"
            return (
                f"players: {name!r} is rewarded, but had no turn in this episode, in "
                f"which {spoke} had; reward those who spoke (envs.player_url)"
            )
    posted = recording.reward, *recording.rewards.values()
    if not sum(map(abs, (*posted, step.reward, *step.players.values()))) <= MOST_FLOAT:
        return (
            f"reward: must be finite in float32 in total; got {step.reward:g} and "
            f"{sum(posted):g} that was posted"
        )
    whole = recording.reward + step.reward
    if len(players) > 1 and (whole or step.rewards):
        got = f"parts {dict(step.rewards)}" if step.rewards else f"{whole:g}"
        return (
            f"reward: the episode has the players {players}, so a reward of the whole "
            f"episode belongs to none of them; got {got}. Use Step.players, or POST "
            ".../players/NAME/reward"
        )
    return ""


def _message(row: Mapping[str, Any]) -> Message:
    """A message as chat templates read it."""
    calls = tuple(
        ToolCall(
            str(call["function"]["name"]),
            _text(call["function"].get("arguments") or {}),
            str(call.get("id") or ""),
        )
        for call in row.get("tool_calls") or ()
    )
    reasoning = row.get("reasoning_content") or row.get("reasoning")
    name = row.get("name")
    return Message(
        row["role"],
        row.get("content") or "",
        reasoning=None if reasoning is None else _text(reasoning),
        tool_calls=calls,
        tool_call_id=row.get("tool_call_id"),
        name=None if name is None else _text(name),
        pictures=row.get("pictures") or (),
    )


def _answer(row: Mapping[str, Any] | None, reason: str, size: int) -> Answer | None:
    """An answer in parts; None if its text is all of it, or all that is known."""
    if row is None:
        return None
    said = _message(row)
    if said == Message("assistant", said.content):
        return None
    return Answer(
        "assistant",
        said.content,
        reason,
        size,
        reasoning=said.reasoning,
        tool_calls=said.tool_calls,
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
