"""docs/how-to: each page's file is used by the page's command, and has an effect."""

import json
import re
import shlex
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import envs
from jaxrl_post.algorithms import contract, grpo
from jaxrl_post.envs import Answer, ToolCall
from jaxrl_post.envs.tools import ToolEnvironment, make_toolset
from jaxrl_post.learner.algorithm import ESTIMATORS
from jaxrl_post.records.directory import read_rows
from jaxrl_post.specs import imported
from launch import dpo
from launch import grpo as launch_grpo

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
PROGRAMS = {"launch.grpo": launch_grpo, "launch.dpo": dpo}
SHORT = (
    "--steps=1",
    "--warm-start.steps=1",
    "--warm-start.examples-per-step=8",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=4",
    "--update.microbatch-tokens=512",
    "--eval.num-tasks=4",
    "--mesh=dp8",
)
# A model that has hardly begun to imitate digits gets samples that differ in reward.
SPREAD = """
from jaxrl_post.envs import Message, Step, Task, response


class Spread:
    name = "spread"

    def tasks(self, split):
        return [Task(i, (Message("user", f"{split}{i}"),), "1") for i in range(20)]

    def step(self, task, conversation):
        return Step(sum(map(ord, response(conversation))) % 7 / 7, done=True)

    def demonstration(self, task):
        return f"{task.id % 10}{7 * task.id % 10}"
"""
SPREADS = (
    *(each for each in SHORT if each != "--warm-start.steps=1"),
    "--env=spread:Spread",
    "--warm-start.steps=20",
)


class Page:
    """A page of the folder: its file, in the working directory, and its command."""

    def __init__(self, name: str) -> None:
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        # A page may have further code and commands; the first are its file's.
        self.code, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        command, *_ = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        _, _, self.program, *self.arguments = shlex.split(command.replace("\\\n", " "))
        [file] = re.findall(r"[Ss]aved as `(\w+)\.py`", text)
        assert len(self.code.splitlines()) <= 30
        Path(f"{file}.py").write_text(self.code)
        self.file = file

    def option(self, name: str) -> str:
        return self.arguments[self.arguments.index(f"--{name}") + 1]

    def run(self, *more: str) -> list[dict[str, float]]:
        """The metrics of each row."""
        assert PROGRAMS[self.program].main([*self.arguments, *more]) == 0
        folder = Path(self.option("run-dir"))
        assert (folder / "report.html").is_file()
        return [row["metrics"] for row in read_rows(folder / "metrics.jsonl")]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Opens a page in an empty directory, from which its file can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spread.py").write_text(SPREAD)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield Page
    for number, handler in handlers.items():
        signal.signal(number, handler)


def trained(rows):
    """The metrics of the steps, without rows of evaluations alone."""
    [row] = [row for row in rows if "train/loss" in row]
    return row


def test_every_page_has_a_test():
    assert {path.stem for path in PAGES.glob("*.md")} >= {
        "advantage", "policy-loss", "kl", "correction", "reward", "environment",
        "tool", "agent", "preference-loss",
    }  # fmt: skip


@pytest.mark.processes
def test_an_advantage(page):
    opened = page("advantage")
    name = opened.option("algorithm.name").partition("?")[0]
    assert contract.broken(imported(name, "algorithm")()) is None
    row = trained(opened.run(*SPREADS))
    # At most half of a group has 2 and the others 0; grpo's advantages add up to 0.
    assert row["rollout/groups_with_spread"] > 0
    assert 0 < row["advantage/mean"] <= 1.0


@pytest.mark.processes
def test_a_policy_loss(page):
    opened = page("policy-loss")
    name = opened.option("algorithm.name").partition("?")[0]
    assert contract.broken(imported(name, "algorithm")()) is None
    row = trained(opened.run(*SPREADS))
    assert row["policy/far"] > 0
    assert row["policy/clip_fraction_high"] == row["policy/clip_fraction_low"] == 0


@pytest.mark.all
@pytest.mark.processes
def test_a_kl(page):
    opened = page("kl")
    name = opened.option("algorithm.name").partition("?")[0]
    algorithm = imported(name, "algorithm")(kl_coefficient=0.5)
    assert contract.broken(algorithm) is None
    # Far from the reference it pulls less than each KL of the package.
    predictions, batch = contract._given(algorithm, 0.0, True, one_update=True)
    batch = batch.replace(reference_logprobs=batch.reference_logprobs - 2.0)  # type: ignore[operator]
    losses = [
        float(each.objective(predictions, batch).loss.mean())
        for each in (
            algorithm,
            *(
                grpo(kl_coefficient=0.5, kl_estimator=ESTIMATORS[estimator])
                for estimator in ("k2", "k3")
            ),
        )
    ]
    assert losses[0] < min(losses[1:])
    row = trained(opened.run(*SPREADS, "--update.minibatches=2"))
    assert row["policy/kl_to_reference"] > 0


@pytest.mark.all
@pytest.mark.processes
def test_a_correction(page):
    opened = page("correction")
    name = opened.option("algorithm.name").partition("?")[0]
    build = imported(name, "algorithm")
    assert contract.broken(build()) is None
    # Without all tokens that any rounding reaches, nothing is left to learn from.
    assert "no gradient reaches" in str(contract.broken(build(most=-1.0)))
    row = trained(opened.run(*SPREADS))
    assert 0 < row["correction/kept"] <= 1
    assert "correction/weight" not in row


@pytest.mark.processes
def test_a_reward(page):
    opened = page("reward")
    rows = opened.run(*SHORT)
    grade = imported("my_reward:same_place", "grader")
    manners = imported("my_reward:manners", "grader")
    assert grade("abd", "abc") == grade("abd", ["x", "abc"]) == 2 / 3
    file = Path(launch_grpo.PROGRAM.recipes["jsonl"]().data.path)
    questions = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    rows_of = {row["prompt"]: row for row in questions}
    samples = list(read_rows(Path(opened.option("run-dir")) / "samples.jsonl"))
    assert samples
    for sample in samples:
        said, row = sample["completion"], rows_of[sample["prompt"]]
        parts = manners(said, row, sample["finish_reason"])
        reward = grade(said, row["answer"]) + 0.2 * sum(parts.values())
        assert sample["reward"] == pytest.approx(reward)
    row = trained(rows)
    assert 0 <= row["reward/same_place"] <= 1
    assert row["reward/manners"] == pytest.approx(
        row["env/manners/ended"] + row["env/manners/long"]
    )


@pytest.mark.processes
def test_a_reward_that_raises_leaves_nothing_behind(page, capsys):
    opened = page("reward")
    Path("my_broken_reward.py").write_text(
        "def of_level(response, row):\n    return row['level']\n"
    )
    opened.arguments += ["--env=jsonl?grader=my_broken_reward:of_level", *SHORT]
    assert launch_grpo.main(opened.arguments) != 0
    told = "".join(capsys.readouterr())
    assert "to train task 0, 'Max sold a red book on Sunday." in told
    assert "KeyError: 'level'" in told
    assert not Path(opened.option("run-dir")).exists()


@pytest.mark.processes
def test_an_environment(page):
    opened = page("environment")
    environment = envs.make(opened.option("env"))
    train, held_out = (
        {task.messages[0].content for task in environment.tasks(split)}
        for split in ("train", "eval")
    )
    assert not train & held_out
    assert len(train | held_out) == 21 * 20
    rows = opened.run(*SHORT)
    assert "env/right" in trained(rows)
    assert any("eval/right" in row for row in rows)


@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("a run of several turns, with worker processes")
def test_a_tool(page):
    pytest.importorskip("docstring_parser", reason="needs the extra 'tools'")
    opened = page("tool")
    toolset = make_toolset(opened.option("tools"))
    [tool] = toolset.tools()
    assert tool.parameters["properties"]["numbers"]["description"] == "at least one."
    session = ToolEnvironment(envs.make("arithmetic"), (toolset,))
    session = session.open(session.tasks("train")[0])
    calls = [
        ToolCall("largest", json.dumps({"numbers": numbers}), str(len(numbers)))
        for numbers in ([3, 7], [])
    ]
    step = session.step(Answer("assistant", "", tool_calls=tuple(calls)))
    said = [message.content for message in step.messages]
    assert said == ["7", "error: ValueError: numbers must not be empty"]
    row = trained(opened.run(*SHORT, "--rollout.max-tokens=4"))
    assert row["env/tools/calls"] >= 0


@pytest.mark.all
@pytest.mark.processes
def test_an_agent(page):
    pytest.importorskip("openai", reason="needs the client 'openai'")
    opened = page("agent")
    row = trained(opened.run(*SHORT))
    assert row["env/agent_first"] == 1
    assert 1 < row["env/agent_turns"] <= 2
    assert abs(row["mismatch/token_mult_prob_error"] - 1) < 1e-3


def test_a_preference_loss(page):
    opened = page("preference-loss")
    name = opened.option("loss.name").partition("?")[0]
    assert contract.broken_preference(imported(name, "loss")()) is None
    pairs = [
        {"prompt": f"{i}=", "chosen": f"{i}", "rejected": "none"} for i in range(40)
    ]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    rows = opened.run("--eval.num-tasks=4", "--mesh=dp8", "--warm-start.steps=1")
    first, *_ = [row["train/loss"] for row in rows if "train/loss" in row]
    # DPO's loss of the policy that is its reference is log 2; an answer has 2 or 3
    # tokens with its stop token, each of which asks for a margin of 0.1 in steps of
    # beta = 0.1.
    low, high = (np.logaddexp(0.0, 0.1 * 0.1 * tokens) for tokens in (1.9, 3.1))
    assert low < first < high
    assert jnp.log(2.0) < low
