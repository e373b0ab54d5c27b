"""The commands and code of README.md and the notebook tutorial work."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxrl_post import pretrained
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import forward, logits
from tests import tiny

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = (ROOT / "docs" / "tutorials" / "notebook.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", NOTEBOOK, re.DOTALL)
TARGETS = re.findall(
    r"(?:`|^)make ([a-z0-9]+)",
    "".join((ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS),
    re.MULTILINE,
)


def run(block: str, folder: Path) -> str:
    """Runs a program where nothing but the installed package is."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.processes
def test_a_model_learns_in_a_notebook(tmp_path):
    found = re.findall(r"token (-?[\d.]+)$", run(BLOCKS[0], tmp_path), re.MULTILINE)
    logprobs = [float(number) for number in found]
    assert len(logprobs) == 10
    assert logprobs[-1] > logprobs[0] + 0.5


@pytest.mark.processes
def test_the_losses_work_in_another_trainer(tmp_path):
    # Two samples of advantages +-a, a = 1/2 over the standard deviation 1/sqrt(2), and
    # five tokens: each has gradient -+a/5 and the masked one none.
    found = [
        float(number) for number in re.findall(r"-?[\d.]+", run(BLOCKS[1], tmp_path))
    ]
    assert found == pytest.approx([-0.141421] * 3 + [0.141421] * 2 + [0.0], rel=1e-4)


@pytest.mark.processes
def test_a_checkpoint_scores_texts(tmp_path):
    # A small model in the place that `make smollm2` fills.
    path = tmp_path / "models" / "SmolLM2-135M-Instruct"
    tokenizer = Tokenizer.train(["The capital of France is Paris."] * 3)
    config = dataclasses.replace(tiny.CONFIG, vocab_size=tokenizer.vocab_size)
    params = tiny.params(config)
    pretrained.save(path, config, params, tokenizer=tokenizer)
    printed = run(BLOCKS[2], tmp_path).splitlines()
    for answer, line in zip((" Paris.", " Rome."), printed, strict=True):
        before, after = map(tokenizer.encode, ("The capital of France is", answer))
        hidden = forward(params, config, jnp.asarray([[*before, *after]]))[0]
        scores = np.asarray(logits(params, config, hidden), np.float64)
        places = np.arange(len(before) - 1, len(before) + len(after) - 1)
        expected = log_softmax(scores, axis=1)[places, after].sum()
        assert line.startswith(f"{answer} ")
        assert float(line.removeprefix(answer)) == pytest.approx(expected, abs=1e-3)


def test_the_readme_has_the_blocks_of_the_notebook():
    assert re.findall(r"```python\n(.*?)```", README, re.DOTALL) == BLOCKS[1:]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 180


def test_targets_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in TARGETS:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_paths_in_the_architecture_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:\w+/)+\w+\.py)", text)
    roots = (ROOT, ROOT / "jaxrl_post")
    missing = [p for p in paths if not any((root / p).is_file() for root in roots)]
    assert len(paths) > 10
    assert all(path.endswith("/NAME.py") for path in missing)


def test_a_stranger_reads_a_step_in_thirteen_files_and_the_house_in_250_lines():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    step = re.findall(r"^\| `((?:\w+/)+\w+\.py)` \|", text, re.MULTILINE)
    assert step[0] == "programs/loop.py"
    assert len(step) <= 13
    # The loop itself fits on a screen or two.
    assert len((ROOT / "jaxrl_post" / step[0]).read_text().splitlines()) <= 170
