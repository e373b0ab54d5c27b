"""how-to/agents.md: its agent is trained by its command."""

import re
import shlex
import signal
from pathlib import Path

import pytest

from jaxrl_post import envs
from jaxrl_post.records.directory import read_rows
from launch import cli, grpo

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "agents.md").read_text(
    encoding="utf-8"
)
COMMANDS = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)


def test_the_game_of_the_guide_has_options_that_exist():
    _, command = COMMANDS
    _, _, program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "launch.grpo"
    config = cli.read_options(grpo.PROGRAM, arguments)
    environment = envs.make(config.env)
    # The longest game has as many turns as there are stones.
    most = max(task.data["stones"] for task in environment.tasks("train"))
    assert most == config.rollout.max_turns == 9


@pytest.mark.processes
def test_the_agent_of_the_guide_trains(tmp_path, monkeypatch):
    agent = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0]
    command, _ = COMMANDS
    (tmp_path / "my_agent.py").write_text(agent)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    program, *arguments = shlex.split(command.replace("\\\n", " "))[2:]
    assert program == "launch.grpo"
    short = (
        "--steps=2",
        "--warm-start.steps=2",
        "--rollout.prompts-per-step=4",
        "--rollout.samples-per-prompt=4",
        "--update.microbatch-tokens=512",
        "--eval.num-tasks=4",
        "--mesh=dp8",
    )
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert grpo.main([*arguments, *short]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    rows = read_rows(tmp_path / "runs/agent/metrics.jsonl")
    trained = [r["metrics"] for r in rows if "env/agent_first" in r["metrics"]]
    assert len(trained) == 2
    for row in trained:
        assert row["env/agent_first"] == 1
        assert 1 <= row["env/agent_turns"] <= 2
        assert abs(row["mismatch/token_mult_prob_error"] - 1) < 1e-3
    assert (tmp_path / "runs/agent/report.html").is_file()
