"""Environments of verifiers, by a small package in its place in another process."""

import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import pytest

from jaxrl_post.envs import AgentEnvironment, Step, make
from jaxrl_post.envs.protocols import verifiers
from tests.envs.tools.http_servers import serving

pytestmark = pytest.mark.processes

SMALL = """
import asyncio, contextlib, dataclasses, json, os, pathlib, types, urllib.request

@dataclasses.dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str

@dataclasses.dataclass
class ModelContext:
    model: str
    client: EvalClientConfig

@dataclasses.dataclass
class Thing:
    type: str = ""
    message: str = ""
    score: float = 0.0
    value: float = 0.0

@dataclasses.dataclass
class Data:
    prompt: object
    system_prompt: str
    idx: int

    def model_dump(self, mode, exclude):
        # Games of one prompt differ in their seed.
        seed = {"seed": self.idx} if self.prompt == "game" else {}
        fields = dict(prompt=repr(self.prompt), idx=self.idx, name=f"#{self.idx}")
        return {n: v for n, v in (fields | seed).items() if n not in exclude}

class Env:
    number = 0

    def __init__(self, config):
        print("what an environment prints is no answer")
        self.ended = pathlib.Path(config["ended"])
        self.taskset = map(self.task, config["prompts"])

    def task(self, prompt):
        said = prompt if isinstance(prompt, str) else [
            types.SimpleNamespace(content=text) for text in prompt]
        self.number += 1
        return types.SimpleNamespace(data=Data(said, "Add.", self.number))

    @contextlib.asynccontextmanager
    async def serving(self):
        try:
            yield
        finally:
            self.ended.touch()

    async def run_episode(self, task, context):
        prompt = task.data.prompt
        if prompt == "die":
            os._exit(3)
        trace = types.SimpleNamespace(rewards={"right": None}, errors=[], reward=0.0)
        traces = [trace] * (2 if prompt == "two" else 1)
        episode = types.SimpleNamespace(errors=[], traces=traces)
        if prompt == "fail":
            episode.errors.append(Thing("EnvError", "it broke"))
        if prompt == "fail too":
            trace.errors.append(Thing("ProviderError", "no model"))
        if prompt in ("fail", "fail too", "two", "unscored"):
            return episode
        said = await asyncio.to_thread(self.asked, prompt, context)
        trace.rewards = {"right": Thing(score=float(said == "4"), value=said == "4")}
        if prompt == "parts":
            trace.rewards["style"] = Thing(score=0.5, value=0.25)
        trace.reward = float(sum(each.value for each in trace.rewards.values()))
        return episode

    def asked(self, prompt, context):
        body = {"model": context.model, "key": os.environ.get(
            context.client.api_key_var), "prompt": prompt}
        request = urllib.request.Request(
            context.client.base_url + "/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read().decode()

def resolve_env_config(data):
    return data

load_environment = Env
"""
PROMPTS = [
    *(f"{number}+1=" for number in range(40)),
    *("same", "same", "die", "fail", "fail too", "two", "unscored", "parts"),
]


@pytest.fixture
def config(tmp_path, monkeypatch):
    package = tmp_path / "small" / "verifiers" / "v1"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SMALL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "small"))
    file = tmp_path / "sums.json"
    ended = str(tmp_path / "ended")
    file.write_text(json.dumps({"prompts": PROMPTS, "ended": ended}))
    yield file
    verifiers._player.cache_clear()


def environment(config, **options) -> verifiers.Verifiers:
    return verifiers.Verifiers(sys.executable, str(config), **options)


def task_of(found, prompt):
    tasks = [*found.tasks("train"), *found.tasks("eval")]
    (task,) = (t for t in tasks if t.messages[0].content.endswith(f"\n\n{prompt}"))
    return task


def test_tasks_are_those_of_the_environment(config, tmp_path):
    spec = f"verifiers?python={sys.executable}&config={config}&most=42"
    found = make(spec)
    assert isinstance(found, AgentEnvironment)
    assert found.name == "verifiers(sums)"
    train, held_out = found.tasks("train"), found.tasks("eval")
    assert [task.id for task in held_out] == list(range(len(held_out)))
    both = [*train, *held_out]
    assert sorted(task.data["task"] for task in both) == list(range(42))
    assert 0 < len(held_out) < len(train)
    assert task_of(found, "3+1=").messages[0].content == "Add.\n\n3+1="
    # Prompts that are equal have their number, so that they can be told apart.
    told = {task.messages[0].content for task in both if task.data["task"] >= 40}
    assert told == {f"Task {index}.\n\nAdd.\n\nsame" for index in (40, 41)}
    assert found.demonstration(train[0]) is None
    # The process is not kept where nothing is played.
    assert (tmp_path / "ended").exists()


def test_copies_of_a_task_are_in_one_split(config):
    ended = str(config.parent / "ended")
    prompts = [*(f"{number}+1=" for number in range(40)), *["game"] * 40]
    config.write_text(json.dumps({"prompts": prompts * 2, "ended": ended}))
    found = environment(config)
    train, held_out = found.tasks("train"), found.tasks("eval")
    sums, games = (
        [
            {
                task.data["task"]
                for task in each
                if (task.data["task"] % 80 < 40) == plain
            }
            for each in (train, held_out)
        ]
        for plain in (True, False)
    )
    assert {n % 80 for n in sums[0]}.isdisjoint({n % 80 for n in sums[1]})
    assert 0 < len(sums[1]) < len(sums[0])
    # Equal prompts of tasks that differ otherwise are no copies.
    assert 0 < len(games[1]) < len(games[0])


def test_an_episode_is_played_by_the_environment(config):
    found = pickle.loads(pickle.dumps(environment(config)))
    asked = []

    def answer(handler, name, said):
        asked.append((name, said))
        return 200, "4"

    with serving(answer) as server:
        found.prepare()
        url = f"{server.url}/episodes/1/v1"
        task = task_of(found, "3+1=")
        assert found.run(task, url) == Step(1.0, done=True)
        parts = {"right": 1.0, "style": 0.5}
        step = found.run(task_of(found, "parts"), url)
        assert step == Step(1.25, done=True, rewards=parts)
    said = {"model": "policy", "key": None, "prompt": "3+1="}
    assert asked[0] == ("episodes/1/v1/chat/completions", said)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("fail", "EnvError: it broke"),
        ("fail too", "ProviderError: no model"),
        ("two", "an episode must have one agent, got 2"),
        ("unscored", "the episode was not scored"),
        ("die", "the process of verifiers ended; it said: what an environment prints"),
    ],
)
def test_an_episode_without_a_reward_fails_and_the_next_does_not(config, prompt, told):
    found = environment(config)
    with pytest.raises(RuntimeError, match=rf"^verifiers\(sums\): {told}"):
        found.run(task_of(found, prompt), "http://127.0.0.1:9/v1")
    with serving(lambda handler, name, said: (200, "4")) as server:
        assert found.run(task_of(found, "3+1="), f"{server.url}/v1").reward == 1.0


def test_what_cannot_be_loaded_is_named(config):
    nowhere = verifiers.Verifiers("/no/such/python", str(config))
    with pytest.raises(RuntimeError, match="'/no/such/python' cannot be run"):
        nowhere.prepare()
    config.write_text('{"ended": "x"}')
    told = r"verifiers ended; it said: (?s:.*)KeyError: 'prompts'"
    with pytest.raises(RuntimeError, match=told):
        environment(config, most=7).tasks("train")
    with pytest.raises(ValueError, match="config must be a file of JSON, there is no"):
        environment(config.with_name("none"))
    config.write_text(json.dumps({"ended": str(config.parent / "e"), "prompts": ["a"]}))
    with pytest.raises(ValueError, match="no task falls into 'eval'"):
        environment(config, most=8).tasks("eval")


PARENT = """
import sys
from jaxrl_post.envs.protocols.verifiers import Verifiers
Verifiers(sys.executable, sys.argv[1]).prepare()
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_a_worker_that_is_killed(config, monkeypatch):
    root = pathlib.Path(__file__).parents[3]
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(root)])
    monkeypatch.setenv("PYTHONPATH", paths)
    with subprocess.Popen(
        (sys.executable, "-c", PARENT, str(config)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as parent:
        assert parent.stdout.readline() == b"ready\n"
        assert not (config.parent / "ended").exists()
        # As the pool does.
        os.killpg(parent.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    # It leaves `serving`, which ends what an episode has started.
    while not (config.parent / "ended").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert (config.parent / "ended").exists()
