"""how-to/environments.md: its commands have options that exist, its rows are read."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jaxrl_post import envs
from jaxrl_post.config.data import DataConfig
from jaxrl_post.envs import Message, StatelessEnvironment
from jaxrl_post.envs.tools import Search
from jaxrl_post.examples.environment import make_environment
from launch import cli, grpo

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "environments.md").read_text(
    "utf-8"
)
SECTIONS = {
    title: (re.findall(r"```json\n(.*?)```", text, re.DOTALL), text)
    for title, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", GUIDE, re.M | re.S)
}
COMMANDS = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
# Section: an answer that its first row calls right.
RIGHT = {
    "Short answers": "the Eiffel Tower!",
    "JSON": '{"name": "Ada", "age": 36}',
    "Queries": "SELECT MAX(a) FROM t",
    "Instructions": "It rains.",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_options_that_exist(command):
    _, _, program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "launch.grpo"
    config = cli.read_options(grpo.PROGRAM, arguments)
    made = make_environment(config.env, config.data, config.tools)
    assert isinstance(made, StatelessEnvironment) or config.tools


def test_there_is_a_command_for_every_environment():
    # One more reads the rows of a recipe.
    assert len(COMMANDS) == 1 + 5
    assert set(RIGHT) | {"A search"} == set(SECTIONS)


def test_the_row_of_the_recipe_is_one_of_its_file():
    [row] = re.findall(r"```jsonl\n(.*?)```", GUIDE, re.DOTALL)
    config = grpo.PROGRAM.recipes["jsonl"]()
    assert row in Path(config.data.path).read_text("utf-8")


@pytest.mark.processes
@pytest.mark.parametrize("title", RIGHT)
def test_rows_are_read_and_judged(title, tmp_path):
    [blocks, text] = SECTIONS[title]
    path = tmp_path / "rows.jsonl"
    rows = [row for row in "".join(blocks).splitlines() if '"database"' not in row]
    path.write_text("\n".join(rows))
    command = re.search(r"--env '?([^' ]+)", text)[1]
    # The generated questions' options do not go with a file.
    spec = re.sub(r"[?&](level|constraints)=\d", "", command)
    environment = make_environment(
        spec, DataConfig(path=str(path), eval_path=str(path))
    )
    (task,) = environment.tasks("eval")
    turn = Message("assistant", RIGHT[title])
    step = environment.step(task, (*task.messages, turn))
    assert step.reward == 1.0


def test_passages_are_found(tmp_path):
    [blocks, _] = SECTIONS["A search"]
    path = tmp_path / "passages.jsonl"
    path.write_text(blocks[0])
    found = Search(str(path)).call("search", {"query": "capital of Italy"})
    assert found == f"[1] Rome\n{json.loads(blocks[0])['text']}"


def test_the_reward_function_of_the_guide(tmp_path, monkeypatch):
    [block] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "guide_sums.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = envs.make("guide_sums:sums")
    task = environment.tasks("train")[0]
    turn = (*task.messages, Message("assistant", task.reference))
    assert environment.step(task, turn).reward == pytest.approx(1.1)
