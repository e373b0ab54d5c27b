"""Agents that call the model through the openai client, as they would anywhere."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

from jaxrl_post.envs import Message, Step, Task, TaskSequence, player_url
from jaxrl_post.envs.tasks.nim import Nim


@dataclass(frozen=True)
class Letters:
    """Two calls; each pays for the share of even digits in its answer.

    Attributes:
        size: tasks of a split.
        branching: asks the second question twice, each time after the first answer.
        credited: each call gets its own reward, posted to .../reward.
        broken: the agent of this task raises.
        silent: the agent of this task makes no call.
        hanging: the agent of this task does not come back after its first call.
        waiting: one agent of this task waits after its first call for a file.
        until: path of the file.
    """

    size: int = 40
    branching: bool = False
    credited: bool = False
    broken: int = -1
    silent: int = -1
    hanging: int = -1
    waiting: int = -1
    until: str = ""
    name: str = "letters"

    def tasks(self, split: str) -> TaskSequence:
        def make(index: int) -> Task:
            return Task(index, (Message("user", f"{split} {index}="),), "")

        return TaskSequence(self.size, make)

    def run(self, task: Task, base_url: str) -> Step:
        if task.id == self.broken:
            raise RuntimeError("out of order")
        if task.id == self.silent:
            return Step(0.0, done=True)
        said = []
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

            def ask(*messages):
                answer = client.chat.completions.create(
                    # An agent's own sampling is not trained on.
                    model="policy",
                    messages=list(messages),
                    temperature=0.3,
                )
                choice = answer.choices[0]
                said.append(choice.message.content)
                return {"role": "assistant", "content": said[-1]}, choice.turn

            begin = {"role": "user", "content": task.messages[0].content}
            first, _ = ask(begin)
            if task.id == self.hanging:
                threading.Event().wait()
            if task.id == self.waiting and first_to_come(f"{self.until}.waits"):
                wait_for(Path(self.until))
            again = [{"role": "user", "content": f"{n}="} for n in (1, 2)]
            for question in again[: 2 if self.branching else 1]:
                _, turn = ask(begin, first, question)
                if self.credited:
                    body = {"reward": share(said[-1]), "turn": turn}
                    url = base_url.removesuffix("/v1") + "/reward"
                    httpx.post(url, json=body).raise_for_status()
        rewards = [share(text) for text in (said[:1] if self.credited else said)]
        return Step(sum(rewards), done=True, metrics={"said": len(said)})

    def demonstration(self, task: Task) -> str:
        return "2"


@dataclass(frozen=True)
class Numbers(Letters):
    """Sends token ids: continues after its first answer, and edits its second one."""

    name: str = "numbers"

    def run(self, task: Task, base_url: str) -> Step:
        server, said = base_url.partition("/episodes/")[0], []
        with httpx.Client(timeout=60) as client:

            def post(url, **body):
                return client.post(url, json=body).raise_for_status().json()

            def ids(text):
                body = {"prompt": text, "add_special_tokens": False}
                return post(f"{server}/tokenize", **body)["tokens"]

            def say(prompt):
                url = base_url.removesuffix("/v1") + "/inference/v1/generate"
                sampling = {"temperature": 0.3, "max_tokens": 3}
                answer = post(url, token_ids=prompt, sampling_params=sampling)
                said.append(answer["choices"][0]["token_ids"])
                return said[-1]

            prompt = ids(task.messages[0].content)
            told = [*prompt, *say(prompt), *ids("1=")]
            second = say(told)
            edit = next(token for token in ids("37") if token != second[0])
            say([*told, edit, *second[1:], *ids("2=")])
        return Step(sum(map(even, said)), done=True)


@dataclass(frozen=True)
class Responding(Letters):
    """Speaks the Responses API: continues by items, or in odd tasks by ids."""

    name: str = "responding"

    def run(self, task: Task, base_url: str) -> Step:
        odd = bool(task.id % 2)
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

            def ask(*items, **options):
                answer = client.responses.create(
                    model="policy", input=list(items), stream=odd, **options
                )
                if odd:
                    *_, last = answer
                    answer = last.response
                return answer

            begin = {"role": "user", "content": task.messages[0].content}
            again = {"role": "user", "content": "1="}
            first = ask(begin)
            if odd:
                second = ask(again, previous_response_id=first.id)
            else:
                second = ask(begin, *first.output, again)
        said = first.output_text, second.output_text
        return Step(sum(map(share, said)), done=True)


@dataclass(frozen=True)
class Choosing(Letters):
    """Two calls whose answers are constrained: one of three, and then only one."""

    name: str = "choosing"

    def run(self, task: Task, base_url: str) -> Step:
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

            def ask(*choices):
                answer = client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": task.messages[0].content}],
                    extra_body={"structured_outputs": {"choice": choices}},
                )
                return answer.choices[0].message.content

            said = ask("4", "6", "17")
            assert ask("3") == "3"
        return Step(float(said == "6"), done=True)


def first_to_come(path: str) -> bool:
    """Whether no other process has come here before."""
    try:
        with open(path, "x"):
            return True
    except FileExistsError:
        return False


def wait_for(path: Path) -> None:
    """Waits until a file is there; ten minutes are a fault."""
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(path)


def even(ids: list[int]) -> float:
    """Share of even token ids."""
    return sum(token % 2 == 0 for token in ids) / max(len(ids), 1)


def share(text: str) -> float:
    """Share of even digits among the characters."""
    return sum(letter in "02468" for letter in text) / max(len(text), 1)


@dataclass(frozen=True)
class Duel(Letters):
    """Two players who hear the same; the one with more even digits wins the difference.

    Attributes:
        posted: rewards are posted to .../reward after each answer, not returned.
        rewarded: rewards that are returned instead, by name.
        whole: a reward of the episode as a whole.
    """

    posted: bool = False
    rewarded: tuple[tuple[str, float], ...] = ()
    whole: float = 0.0
    name: str = "duel"

    def run(self, task: Task, base_url: str) -> Step:
        said = {"left": [], "right": []}
        heard = {name: [] for name in said}
        # In turn, and both begin with the same message.
        for name in ("left", "right", "left", "right"):
            url = player_url(base_url, name)
            content = f"{len(said[name])}="
            heard[name].append({"role": "user", "content": content})
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                answer = client.chat.completions.create(
                    model="policy", messages=heard[name]
                )
            said[name].append(answer.choices[0].message.content)
            heard[name].append({"role": "assistant", "content": said[name][-1]})
            if self.posted:
                body = {"reward": float(len(said[name]))}
                beside = url.removesuffix("/v1") + "/reward"
                httpx.post(beside, json=body).raise_for_status()
        left, right = (sum(map(share, said[name])) for name in ("left", "right"))
        players = {"left": left - right, "right": right - left}
        if self.posted or self.rewarded:
            players = dict(self.rewarded)
        return Step(self.whole, done=True, players=players)


@dataclass(frozen=True)
class Lenient(Nim):
    """Nim for a model that does not know digits yet: any answer is some legal move."""

    def move(self, said: str, stones: int) -> int | None:
        return min(stones, 1 + sum(map(ord, said)) % 3)
