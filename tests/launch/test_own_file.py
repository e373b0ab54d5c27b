"""A stranger's algorithm is one file: all that a run offers works with it as it is."""

import json
import signal
import sys
from pathlib import Path

import pytest

from jaxrl_post.records.directory import read_rows
from launch import evaluate, grpo, report

FILE = '''
import jax.numpy as jnp

from jaxrl_post.algorithms import Algorithm, PolicyTerm, compose
from jaxrl_post.losses import reduce
from jaxrl_post.metrics import masked


def above_mean(rewards, valid):
    known = jnp.where(valid, rewards, 0.0)
    count = jnp.maximum(valid.astype(jnp.float32).sum(axis=1, keepdims=True), 1.0)
    mean = known.sum(axis=1, keepdims=True) / count
    return jnp.where(valid, known - mean, 0.0)


def loss(logprobs, proximal, advantages, mask, segment_ids):
    moved = jnp.where(mask, logprobs - proximal, 0.0)
    never = masked(jnp.zeros_like(moved), mask)
    values = jnp.where(mask, -advantages * (1.0 + moved), 0.0)
    term = {"stranger/moved": masked(moved, mask)}
    return PolicyTerm(values, jnp.exp(moved), never, never, term)


def pull(policy_logprobs, reference_logprobs, mask):
    return jnp.where(mask, policy_logprobs - reference_logprobs, 0.0) ** 2


def linear(*, pulling: float = 0.1, **shared) -> Algorithm:
    """The first order of the ratio, and a quadratic KL."""
    parts = {"policy_loss": loss, "reduction": reduce.token_mean}
    parts |= {"kl_estimator": pull, "kl_coefficient": pulling}
    return compose(advantages=above_mean, **parts, **shared)
'''
NAME = "stranger:linear?pulling=0.5"
SHORT = (
    f"--algorithm.name={NAME}",
    "--recipe=demo",
    "--run-dir=run",
    "--warm-start.steps=1",
    "--warm-start.examples-per-step=8",
    "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=4",
    "--update.microbatch-tokens=512",
    "--eval.num-tasks=4",
    "--optimizer.schedule=constant",
    "--mesh=dp8",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with nothing but the stranger's file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stranger.py").write_text(FILE)
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.modules.pop("stranger", None)


def told(folder: Path) -> list[float]:
    """The algorithm's own metric, by step."""
    rows = [row["metrics"] for row in read_rows(folder / "run" / "metrics.jsonl")]
    return [row["stranger/moved"] for row in rows if "stranger/moved" in row]


@pytest.mark.processes
@pytest.mark.slow("a run, its resumption and an evaluation")
def test_one_file_is_enough(folder, capsys):
    assert grpo.main([*SHORT, "--steps=1"]) == 0
    run = folder / "run"
    assert len(told(folder)) == 1
    config = json.loads((run / "config.json").read_text())["config"]
    assert config["algorithm"]["name"] == NAME
    assert "stranger/moved" in (run / "report.html").read_text("utf-8")
    # It resumes from its checkpoint, by the options or by its config.json.
    assert grpo.main(["--config=run/config.json", "--steps=2"]) == 0
    assert len(told(folder)) == 2
    assert report.main(["run"]) == 0
    evaluated = ["--model=run/model", "--env=arithmetic?level=0", "--num-tasks=4"]
    assert evaluate.main([*evaluated, "--max-tokens=4"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        grpo.main([*SHORT, "--help", "algorithm"])
    assert ended.value.code in (0, None)
    assert "<module>:<function>" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} <= {
        "stranger.py", "run", "__pycache__", "runs",
    }  # fmt: skip
