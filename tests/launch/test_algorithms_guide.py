"""docs/algorithms.md: its algorithm keeps the contract and trains by its command."""

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from jaxrl_post.algorithms import contract
from jaxrl_post.records.directory import read_rows
from jaxrl_post.specs import imported
from launch import grpo

GUIDE = Path(__file__).parents[2] / "docs" / "algorithms.md"


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """The guide's command, beside the guide's file."""
    text = GUIDE.read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [command] = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 40
    (tmp_path / "my_algorithm.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_algorithm", raising=False)
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.processes
def test_the_algorithm_of_the_guide_trains(guide, tmp_path):
    assert contract.broken(imported("my_algorithm:leash", "algorithm")()) is None
    assert guide[:3] == ["python", "-m", "launch.grpo"]
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
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert grpo.main([*guide[3:], *short]) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    rows = read_rows(tmp_path / "runs/leash/metrics.jsonl")
    trained = [r["metrics"] for r in rows if "policy/far" in r["metrics"]]
    assert len(trained) == 2
    for metrics in trained:
        assert metrics["policy/far"] >= 0
        assert metrics["policy/clip_fraction_high"] == 0
        assert "policy/kl_to_reference" in metrics
    assert (tmp_path / "runs/leash/report.html").is_file()
