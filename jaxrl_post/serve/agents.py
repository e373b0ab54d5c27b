"""Episodes that agents carry out: programs that call the model over HTTP themselves.

An agent runs in a worker process (`envs.AgentEnvironment`) and knows one thing: the
base URL of its episode. The server is in the process of the trainer; its sampler is
driven by `AgentCollector.poll`, in the thread of the trainer, with its own arrays.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from jaxrl_post.envs.env import BASE_URL, Answer, Step, Task
from jaxrl_post.envs.workers.interface import Outcome
from jaxrl_post.messages import Message, ToolCall
from jaxrl_post.rollout.collector import RolloutTimeoutError
from jaxrl_post.rollout.episode import Episode, EpisodeEnd, Group, Turn
from jaxrl_post.rollout.judgements import Judgements, Judges
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sampler.requests import MOST_FLOAT, SampleId
from jaxrl_post.serve.app import make_app
from jaxrl_post.serve.calls import Served
from jaxrl_post.serve.episodes import Episodes
from jaxrl_post.serve.recordings import KINDS, Recording
from jaxrl_post.serve.service import Sampler
from jaxrl_post.tokens import Tokens

__all__ = ["AgentCollector", "AgentServer"]

# Name of the reward part that agents post, in addition to an environment's own parts.
POSTED = "posted"
# Seconds for what the server's own thread has to do.
LOOP_S = 60.0
# Seconds between two looks at whether a judgement has arrived, while nothing samples.
IDLE_S = 0.01


@dataclass
class AgentServer:
    """The server, in a thread of the trainer's process.

    Attributes:
        served: the model; its service is not started, but pumped by the collector.
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
        with socket.create_server((host, port), backlog=2048) as listener:
            loop = asyncio.new_event_loop()
            config = uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
            server = uvicorn.Server(config)

            def run() -> None:
                asyncio.set_event_loop(loop)
                with contextlib.closing(loop):
                    loop.run_until_complete(server.serve(sockets=[listener]))

            thread = threading.Thread(target=run, name="agents", daemon=True)
            thread.start()
            host, port = listener.getsockname()[:2]
            try:
                yield cls(served, episodes, f"http://{host}:{port}", loop)
            finally:
                served.service.abandon()
                server.should_exit = True
                thread.join(LOOP_S)

    def call[Result](self, work: Callable[[], Result]) -> Result:
        """Runs a function in the server's thread, where the recordings belong."""

        async def run() -> Result:
            return work()

        coroutine: Coroutine[Any, Any, Result] = run()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LOOP_S)


@dataclass
class _Open:
    """A group with unfinished episodes."""

    task: Task
    sampling: SamplingParams
    count: int
    begun: bool = False
    # The names of episodes under way, by sample.
    names: dict[int, str] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)


@dataclass
class AgentCollector:
    """Carries out episodes by agents; the interface of `rollout.collector.Collector`.

    An unfinished episode is in no checkpoint: its agent is a program that cannot be
    saved. So all episodes of a step end before the step does.

    Attributes:
        server: the agents' server.
        judges: the environment, in worker processes, one agent each at a time.
        max_turns: most calls of an episode that are answered.
        deadline_s: maximum seconds of one call of `run`.
        seconds: time spent by phase, "rollout" and "reward"; the caller may reset it.
    """

    server: AgentServer
    judges: Judges
    max_turns: int
    deadline_s: float = 3600.0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"rollout": 0.0, "reward": 0.0}
    )
    _open: dict[int, _Open] = field(default_factory=dict, init=False)
    _agents: Judgements = field(init=False)

    def __post_init__(self) -> None:
        self._agents = Judgements(self.judges)

    @property
    def in_flight(self) -> int:
        """Number of unfinished groups."""
        return len(self._open)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt ids of the unfinished groups, the oldest first."""
        return tuple(self._open)

    def apart(self) -> "AgentCollector":
        """A collector of the same kind without episodes."""
        return AgentCollector(self.server, self.judges, self.max_turns, self.deadline_s)

    def run(
        self,
        sampler: Sampler,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> list[Group]:
        """Runs the episodes of all tasks until they end, as `Collector.run`."""
        self.start(tasks, num_samples, sampling)
        done: dict[int, Group] = {}
        deadline = time.monotonic() + self.deadline_s
        while len(done) < len(tasks):
            done |= {group.prompt_id: group for group in self.poll(sampler, deadline)}
        return [done[prompt_id] for prompt_id, _ in tasks]

    def start(
        self,
        tasks: Sequence[tuple[int, Task]],
        num_samples: int,
        sampling: SamplingParams,
    ) -> None:
        """Starts episodes; the next `poll` starts their agents."""
        for prompt_id, task in tasks:
            if prompt_id in self._open:
                raise ValueError(
                    f"start: a group has the prompt id {prompt_id} already"
                )
            self._open[prompt_id] = _Open(task, sampling, num_samples)

    def poll(self, sampler: Sampler, deadline: float) -> list[Group]:
        """Samples what agents ask for, and ends the episodes of those that are done.

        Args:
            sampler: with parameters bound.
            deadline: value of `time.monotonic` at which the round stops waiting.

        Returns:
            The groups that finished, in the order of their start.

        Raises:
            RolloutTimeoutError: the deadline has passed.
        """
        if time.monotonic() > deadline:
            raise RolloutTimeoutError(
                f"rollout: {len(self._agents)} agents were not done after "
                f"{self.deadline_s:g} s; raise --rollout.deadline-s, or lower "
                "--rollout.reward-deadline-s, which bounds one agent"
            )
        begin = time.perf_counter()
        for prompt_id, group in self._open.items():
            if not group.begun:
                group.begun = True
                for index in range(group.count):
                    self._begin((prompt_id, index), group)
        self.server.served.service.pump(sampler, wait_s=IDLE_S)
        pumped = time.perf_counter()
        for sample, outcome in self._agents.take(deadline, grace_s=0.0, idle=False):
            self._ended(sample, outcome)
        self.seconds["rollout"] += pumped - begin
        self.seconds["reward"] += time.perf_counter() - pumped
        done = [
            prompt_id
            for prompt_id, group in self._open.items()
            if len(group.episodes) == group.count
        ]
        return [Group(i, _ordered(self._open.pop(i).episodes)) for i in done]

    def pause(self, sampler: Sampler) -> None:
        """Nothing: all episodes have ended."""
        del sampler

    def suspend(self, sampler: Sampler) -> None:
        """Nothing: all episodes have ended."""
        del sampler

    def state(self) -> list[dict[str, Any]]:
        """[]: all episodes have ended."""
        assert not self._open, "a step ends when its episodes have ended"
        return []

    def restore(
        self, value: Sequence[Mapping[str, Any]], tasks: Mapping[int, Task]
    ) -> None:
        """Restores a value of `state`."""
        del tasks
        if value:
            raise ValueError(
                f"the checkpoint has {len(value)} unfinished groups, which agents "
                "cannot go on with; resume with the environment of the run's start"
            )
        self._open = {}
        self._agents.forget()

    def _begin(self, sample: SampleId, group: _Open) -> None:
        """Opens an episode and has its agent started."""
        prompt_id, index = sample
        name = group.names[index] = _name(sample)
        recording = Recording(
            name,
            seed=prompt_id << 32 | index,
            sampling=group.sampling,
            most_turns=self.max_turns,
        )
        deadline_s = self.deadline_s
        self.server.call(lambda: self.server.episodes.keep(recording, deadline_s))
        url = f"{self.server.url}/episodes/{name}/v1"
        task = dataclasses.replace(group.task, data={**group.task.data, BASE_URL: url})
        self._agents.request(task, (), sample)

    def _ended(self, sample: SampleId, outcome: Outcome) -> None:
        group = self._open[sample[0]]
        why = "the agent is done"
        if outcome.kind == "timeout":
            why = "its agent was stopped at --rollout.reward-deadline-s"
        elif outcome.step is None:
            why = f"its agent has failed ({outcome.kind})"
        # A call that is still running, or one of a thread that the agent left, is
        # refused with this reason or, later, because there is no such episode: no later
        # episode has its name.
        name = group.names[sample[1]]
        recording = self.server.call(lambda: self.server.episodes.take(name, why))
        self._agents.end(sample)
        group.episodes[sample[1]] = _episode(
            sample, group.task, recording, outcome, self.server.served.tokenizer.decode
        )


def _name(sample: SampleId) -> str:
    """A name for the URL of an episode, which no other episode has.

    A sample may be run again, in an evaluation or after a run was resumed, while a
    process that an agent left behind still calls the URL that it was given. The noise
    of an episode comes from its seed, never from its name.
    """
    return f"{sample[0]}-{sample[1]}-{secrets.token_hex(8)}"


def _ordered(episodes: Mapping[int, Episode]) -> tuple[Episode, ...]:
    return tuple(episodes[index] for index in sorted(episodes))


def _episode(
    sample: SampleId,
    task: Task,
    recording: Recording,
    outcome: Outcome,
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
                    Tokens.context(context.ids.tolist()),
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
