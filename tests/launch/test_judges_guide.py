"""how-to/judges.md: its commands have options that exist, and its files are read."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jaxrl_post import envs
from jaxrl_post.config.data import DataConfig
from jaxrl_post.envs import Message
from jaxrl_post.examples.environment import make_environment
from launch import cli, grpo, reward, serve
from tests.envs.judges.judge_server import serving

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "judges.md").read_text("utf-8")
JUDGED, MODELLED = (
    [shlex.split(command) for command in block.replace("\\\n", " ").splitlines()]
    for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
)
ROW, MIXTURE = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
GRADE = json.dumps({"reason": "so it is", "grade": 10})


def test_the_commands_and_the_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(ROW)
    Path("rubric.txt").write_text("Be brief.")
    served, trained = JUDGED
    assert (served[2], trained[2]) == ("launch.serve", "launch.grpo")
    options = cli.read_options(serve.PROGRAM, served[3:])
    config = cli.read_options(grpo.PROGRAM, trained[3:])
    assert f"url=http://127.0.0.1:{options.port}/v1" in config.env
    with serving(lambda body: GRADE) as server:
        spec = config.env.replace("http://127.0.0.1:8001/v1", server.url)
        data = DataConfig(path="prompts.jsonl", eval_path="prompts.jsonl")
        environment = make_environment(spec, data)
        [task] = environment.tasks("eval")
        said = Message("assistant", "Scattering.")
        assert environment.step(task, (*task.messages, said)).reward == 1
    [body] = server.asked
    assert "Must name scattering." in body["messages"][1]["content"]
    assert len([*Path("runs/verdicts").rglob("*.json")]) == 1


def test_the_commands_of_a_reward_model():
    rewarded, trained = MODELLED
    assert (rewarded[2], trained[2]) == ("launch.reward", "launch.grpo")
    options = cli.read_options(reward.PROGRAM, rewarded[3:])
    config = cli.read_options(grpo.PROGRAM, trained[3:])
    assert config.reward.model == f"{options.run_dir}/model"
    assert config.reward.weight == 0.2


def test_the_reward_function(tmp_path, monkeypatch):
    [block] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    with serving(lambda body: GRADE) as server:
        url = "http://127.0.0.1:8001/v1"
        assert url in block
        (tmp_path / "guide_polite.py").write_text(block.replace(url, server.url))
        monkeypatch.syspath_prepend(str(tmp_path))
        environment = envs.make("guide_polite:polite")
        task = environment.tasks("train")[0]
        said = Message("assistant", task.reference)
        step = environment.step(task, (*task.messages, said))
    assert step.reward == pytest.approx(1.1)


def test_the_mixture(tmp_path):
    path = tmp_path / "mixture.json"
    path.write_text(MIXTURE)
    environment = envs.make(f"mixture?path={path}&size=400")
    parts = [task.data["part"] for task in environment.tasks("train")]
    assert [parts.count(number) for number in (0, 1)] == [300, 100]
