"""Environments of OpenEnv: a server with one environment per connection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from jaxrl_post.envs.env import Answer, Message, Split, Step, Task
from jaxrl_post.envs.json_server import JsonServer
from jaxrl_post.envs.protocols.actions import (
    ActionError,
    action_of,
    check_field,
    text_of_observation,
)
from jaxrl_post.envs.protocols.openenv_client import (
    OpenEnvClient,
    RefusalError,
    Result,
    load_library,
)
from jaxrl_post.envs.servers import Retries, ServerError, UnreachableError
from jaxrl_post.envs.tasks.ranges import require_integer
from jaxrl_post.envs.tools.journal import Journal
from jaxrl_post.envs.tools.toolset import ToolError

__all__ = ["OpenEnv"]


class OpenEnv:
    """Episodes of an OpenEnv server; needs the extra `openenv`.

    A task is a seed. The prompt has the schema of an action, as a system message, and
    "Episode SEED." with the observation that follows a reset with this seed. Each
    answer of the policy is an action: a JSON object in it, or with `action` the text as
    the value of one field. The next message is the observation after it, and the turn
    earns the reward that the server gives. A text that is no action, or that the server
    refuses, is answered with the reason, and earns nothing.

    Each episode has a connection of its own. If it breaks, there is a new one, which is
    reset with the seed and gets the earlier actions again, for at most `seconds`; the
    server must answer them as it did. If it does not come back, the episode fails.

    The server is asked for the schema when this object is made, and for the first
    observations when the tasks are, one after the other.

    Args:
        url: of the WebSocket, such as "ws://127.0.0.1:8001/ws".
        tasks: number of training tasks, with even seeds, in [1, 2**31).
        eval_tasks: number of held-out tasks, with odd seeds, in [1, 2**31).
        action: the field of an action that is the policy's text; None for JSON.
        observation: the field of an observation that is shown; None for all, without
            metadata.
        system: the system message; None for the schema of an action, "" for none.
        seconds: of a request with all its attempts, at most. It must stay below the
            deadline of a judgement (`--rollout.reward-deadline-s`).
        most_bytes: of a message of the server, at least 1.

    Raises:
        ModuleNotFoundError: the package websockets is not installed.
        ValueError: an argument is outside its range, the server is not there, or its
            actions have no such field.

    >>> OpenEnv("http://127.0.0.1:8001")
    Traceback (most recent call last):
    ValueError: url must begin with ws:// or wss://, got 'http://127.0.0.1:8001'
    """

    def __init__(
        self,
        url: str,
        tasks: int = 1000,
        eval_tasks: int = 100,
        action: str | None = None,
        observation: str | None = None,
        system: str | None = None,
        seconds: float = 5.0,
        most_bytes: int = 1 << 20,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("ws://", "wss://")):
            raise ValueError(f"url must begin with ws:// or wss://, got {url!r}")
        require_integer("tasks", tasks, 1, 2**31)
        require_integer("eval_tasks", eval_tasks, 1, 2**31)
        require_integer("most_bytes", most_bytes, 1, 2**31)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise ValueError(f"seconds must be a number, got {seconds!r}")
        if not seconds > 0:
            raise ValueError(f"seconds must be positive, got {seconds!r}")
        load_library()
        self.url = url
        self.action = action
        self.observation = observation
        self.seconds = seconds
        self.most_bytes = most_bytes
        self._sizes: Mapping[Split, int] = {"train": tasks, "eval": eval_tasks}
        try:
            self.schema = _schema(url, seconds)
        except ServerError as error:
            raise ValueError(str(error)) from error
        check_field(action, self.schema)
        self._system = _explained(self.schema, action) if system is None else system
        self._tasks: dict[Split, tuple[Task, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes get their tasks with the requests.
        return {**self.__dict__, "_tasks": {}}

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "openenv"

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The tasks of a split; the server is reset once for each.

        Args:
            split: "train" or "eval".

        Raises:
            ServerError: the server fails, or does not answer in time.
        """
        if split not in self._tasks:
            episode = _Episode(self)
            try:
                self._tasks[split] = tuple(
                    self._task(index, 2 * index + (split == "eval"), episode)
                    for index in range(self._sizes[split])
                )
            finally:
                episode.close()
        return self._tasks[split]

    def prepare(self) -> None:
        """Imports websockets, so that the first turn need not wait for it.

        Raises:
            ModuleNotFoundError: it is not installed.
        """
        load_library()

    def demonstration(self, task: Task) -> None:
        """None: the server knows no good action."""
        del task

    def open(self, task: Task) -> OpenEnvSession:
        """Connects, and resets with the seed of a task.

        Raises:
            ServerError: the server fails, or does not answer in time, or answers the
                seed differently than before.
        """
        return OpenEnvSession(self, task)

    def _task(self, index: int, seed: int, episode: _Episode) -> Task:
        first = episode.begun(seed)
        prompt = Message("user", f"Episode {seed}.\n\n{first}")
        messages = (Message("system", self._system), prompt)
        data = {"seed": seed, "first": first}
        return Task(index, messages if self._system else (prompt,), "", data)


class OpenEnvSession:
    """One episode; from `OpenEnv.open`."""

    def __init__(self, environment: OpenEnv, task: Task) -> None:
        self._environment = environment
        self._refused = 0
        self._episode = _Episode(environment)
        try:
            self._begin(task)
        except ServerError:
            self.close()
            raise

    def step(self, turn: Answer) -> Step:
        """Carries the policy's action out.

        Raises:
            ServerError: the server fails, or does not answer in time.
        """
        environment = self._environment
        try:
            action = action_of(turn.content, environment.action, environment.schema)
            text, reward, done = self._episode.step(action)
        except (ActionError, ToolError) as error:
            self._refused += 1
            text, reward, done = f"error: {error}", 0.0, False
        metrics = {"openenv/refused": float(self._refused)}
        messages = () if done else (Message("user", text),)
        return Step(reward, done, messages, metrics)

    def close(self) -> None:
        """Ends the session at the server."""
        self._episode.close()

    def _begin(self, task: Task) -> None:
        seed, before = task.data["seed"], task.data["first"]
        first = self._episode.begun(seed)
        if first != before:
            raise ServerError(
                f"{self._environment.url}: a reset with seed {seed} gave {first!r:.80} "
                f"after {before!r:.80}: an environment must depend on its seed alone, "
                "as lost episodes are taken again"
            )


class _Episode:
    """A connection that is made again where it breaks."""

    def __init__(self, environment: OpenEnv) -> None:
        self._environment = environment
        self._retries = Retries(environment.seconds)
        self._journal = Journal(environment.url)
        self._seed = 0
        self._client: OpenEnvClient | None = None

    def begun(self, seed: int) -> str:
        """The text of the first observation of a seed."""
        self._seed = seed

        def attempt(until: float) -> Result:
            client = self._connected(until)
            try:
                return client.reset(seed, until)
            except UnreachableError:
                self.close()
                raise

        result = self._retries(attempt)
        if result.done:
            raise ServerError(f"{self._environment.url}: seed {seed} ends at its reset")
        return self._shown(result)

    def step(self, action: dict[str, Any]) -> tuple[str, float, bool]:
        """The text of the observation, the reward, and whether it is the last.

        Raises:
            ToolError: the server refuses the action.
        """
        made = self._journal.make("step", action, self._made)
        text, reward, done = json.loads(made)
        return text, reward, done

    def close(self) -> None:
        """Ends the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _made(self, name: str, action: Mapping[str, Any]) -> str:
        del name

        def attempt(until: float) -> str:
            if self._client is None:
                client = self._connected(until)
                try:
                    client.reset(self._seed, until)
                    self._journal.replay(
                        lambda _, before: self._sent(client, before, until)
                    )
                except UnreachableError:
                    self.close()
                    raise
            assert self._client is not None, "it was connected"
            try:
                return self._sent(self._client, action, until)
            except UnreachableError:
                self.close()
                raise

        return self._retries(attempt)

    def _connected(self, until: float) -> OpenEnvClient:
        if self._client is None:
            environment = self._environment
            self._client = OpenEnvClient(environment.url, until, environment.most_bytes)
        return self._client

    def _sent(
        self, client: OpenEnvClient, action: Mapping[str, Any], until: float
    ) -> str:
        """Writes an action's result as text, to be compared in a replay."""
        try:
            result = client.step(dict(action), until)
        except RefusalError as error:
            raise ToolError(str(error)) from error
        return json.dumps([self._shown(result), result.reward, result.done])

    def _shown(self, result: Result) -> str:
        environment = self._environment
        try:
            return text_of_observation(result.observation, environment.observation)
        except ValueError as error:
            raise ServerError(f"{environment.url}: {error}") from error


def _schema(url: str, seconds: float) -> Mapping[str, Any]:
    """JSON schema of an action, which the server tells over HTTP."""
    parts = urlsplit(url)
    scheme = {"ws": "http", "wss": "https"}[parts.scheme]
    path = parts.path.removesuffix("/ws")
    server = JsonServer(urlunsplit((scheme, parts.netloc, path, "", "")))
    try:
        reply = Retries(seconds)(lambda until: server.get("schema", until))
    finally:
        server.close()
    try:
        schema = json.loads(reply.text)["action"]
        schema.get("properties", {}).items()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(
            f"GET {server.url}/schema: status {reply.status} and no schema of an "
            f"action: {reply.text!r:.200}"
        ) from error
    return schema


def _explained(schema: Mapping[str, Any], field: str | None) -> str:
    """Describes an action's fields for the system message."""
    properties = {
        name: value
        for name, value in schema.get("properties", {}).items()
        if name != "metadata"
    }
    if field is None:
        shown = json.dumps({**schema, "properties": properties}, ensure_ascii=False)
        return f"Answer with an action, a JSON object of this schema:\n{shown}"
    shown = json.dumps(properties[field], ensure_ascii=False)
    return f"Answer with nothing but an action, the {field}, of this schema:\n{shown}"
