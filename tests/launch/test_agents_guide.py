"""how-to/agents.md: its agent is trained by its command."""

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from jaxrl_post import envs
from jaxrl_post.records.directory import read_rows
from launch import cli, grpo

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "agents.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "notebooks" / "train_your_agent.ipynb"
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


SHORT = (
    "--steps=2",
    "--warm-start.steps=2",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=4",
    "--update.microbatch-tokens=512",
    "--eval.num-tasks=4",
    "--mesh=dp8",
)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trains an agent for two steps; returns the metrics of both."""

    def train(agent: str, arguments: list[str]) -> list[dict[str, float]]:
        (tmp_path / "my_agent.py").write_text(agent)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            assert grpo.main([*arguments, *SHORT]) == 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        rows = list(read_rows(tmp_path / "runs/agent/metrics.jsonl"))
        assert [row["step"] for row in rows] == [0, 1, 2]
        return [row["metrics"] for row in rows[1:]]

    return train


@pytest.mark.processes
@pytest.mark.slow("compiles a run with agents on eight devices")
def test_the_agent_of_the_guide_trains(trained, tmp_path):
    agent = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0]
    command, _ = COMMANDS
    program, *arguments = shlex.split(command.replace("\\\n", " "))[2:]
    assert program == "launch.grpo"
    for row in trained(agent, arguments):
        assert row["env/agent_first"] == 1
        assert 1 <= row["env/agent_turns"] <= 2
        assert abs(row["mismatch/token_mult_prob_error"] - 1) < 1e-3
    assert (tmp_path / "runs/agent/report.html").is_file()


@pytest.mark.processes
def test_the_agent_of_the_notebook_trains_and_its_cells_read_the_run(trained, capsys):
    """The notebook without its twenty steps and without its server."""
    cells = [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    agent, command, curves, learned, same, conversation, served = cells
    said: dict[str, Any] = {}
    # The command alone of its cell: the run follows here.
    exec(command.partition("done = ")[0], said)
    first, _, agent = agent.partition("\n")
    assert first == "%%writefile my_agent.py"
    rows = trained(agent, said["COMMAND"].split())
    pyplot = said["plt"]
    pyplot.switch_backend("Agg")
    try:
        with pyplot.rc_context():
            exec(curves, said)
    finally:
        pyplot.close("all")
    exec(same, said)
    exec(conversation, said)
    assert said["curve"]("reward/mean") == [row["reward/mean"] for row in rows]
    assert "tokens trained on" in capsys.readouterr().out
    # This test leaves out the steps that learn, and a server of the trained model.
    assert 'curve("reward/mean")' in learned
    assert '"-m", "launch.serve"' in served
