"""how-to/algorithms.md: its functions keep the contract, and its commands train."""

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from jaxrl_post.algorithms import contract
from jaxrl_post.records.directory import read_rows
from jaxrl_post.specs import imported
from launch import dpo, grpo

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "algorithms.md"


TEXT = GUIDE.read_text(encoding="utf-8")
CODES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """Writes a file of the guide where its command is given, and reads the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(number: int, name: str) -> list[str]:
        code, command = CODES[number], COMMANDS[number]
        assert len(code.splitlines()) <= 30
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return shlex.split(command.replace("\\\n", " "))

    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield write
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.processes
def test_the_algorithm_of_the_guide_trains(guide, tmp_path):
    command = guide(0, "my_algorithm")
    assert contract.broken(imported("my_algorithm:leash", "algorithm")()) is None
    assert command[:3] == ["python", "-m", "launch.grpo"]
    short = (
        "--steps=2",
        "--warm-start.steps=2",
        "--rollout.prompts-per-step=4",
        "--rollout.samples-per-prompt=4",
        "--update.microbatch-tokens=512",
        "--update.minibatches=2",
        "--eval.num-tasks=4",
        "--mesh=dp8",
    )
    assert grpo.main([*command[3:], *short]) == 0
    rows = read_rows(tmp_path / "runs/leash/metrics.jsonl")
    trained = [r["metrics"] for r in rows if "policy/far" in r["metrics"]]
    assert len(trained) == 2
    for metrics in trained:
        assert metrics["policy/far"] >= 0
        assert metrics["policy/clip_fraction_high"] == 0
        assert "policy/kl_to_reference" in metrics
    assert (tmp_path / "runs/leash/report.html").is_file()


def test_the_preference_loss_of_the_guide_trains(guide, tmp_path):
    command = guide(1, "my_loss")
    assert contract.broken_preference(imported("my_loss:longer", "loss")()) is None
    assert command[:3] == ["python", "-m", "launch.dpo"]
    pairs = [
        {"prompt": f"{i}=", "chosen": f"{i}", "rejected": "none"} for i in range(40)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    assert dpo.main([*command[3:], "--eval.num-tasks=4", "--mesh=dp8"]) == 0
    rows = read_rows(tmp_path / "runs/longer/metrics.jsonl")
    assert "preference/margin" in {name for row in rows for name in row["metrics"]}
