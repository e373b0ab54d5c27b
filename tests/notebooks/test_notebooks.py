"""The notebooks run, and the outputs that are committed are theirs."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ANOTHER_TRAINER = ROOT / "notebooks" / "grpo_in_another_trainer.ipynb"
LARGEST = 400_000  # bytes

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None, reason="needs the extra 'notebooks'"
)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "grpo_in_another_trainer", "losses", "train_your_agent"
    ]  # fmt: skip


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def kinds(cell: dict) -> list[list[str]]:
    """Outputs that a reader sees below a cell: the types of each."""
    return [
        sorted(output.get("data", {output.get("name"): None}))
        for output in cell["outputs"]
    ]


@each_notebook
def test_is_committed_as_it_ran_from_top_to_bottom(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        types = {output["output_type"] for output in cell["outputs"]}
        assert types <= {"stream", "display_data", "execute_result"}, source(cell)
        assert ["stderr"] not in kinds(cell), source(cell)


@each_notebook
def test_every_plot_is_committed(path):
    cells = code_cells(path)
    plots = [cell for cell in cells if "plt.show()" in source(cell)]
    assert plots
    for cell in cells:
        shown = any("image/png" in kind for kind in kinds(cell))
        assert shown == (cell in plots), source(cell)
    assert path.stat().st_size < LARGEST


@each_notebook
def test_holds_nothing_of_the_machine_that_ran_it(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"] == {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    for cell in code_cells(path):
        for output in cell["outputs"]:
            output.get("data", {}).pop("image/png", None)
            place = re.search(r"(?:^|[\s\"'(=])/\w+/\w+", json.dumps(output))
            assert place is None, place


def test_another_trainer_takes_the_losses_alone():
    allowed = {"typing", "jax", "jax.numpy", "flax", "matplotlib.pyplot", "optax"}
    ours = set()
    for cell in code_cells(ANOTHER_TRAINER):
        for node in ast.walk(ast.parse(source(cell))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            ours |= {name for name in names if name.startswith("jaxrl_post")}
            assert set(names) <= allowed | ours
    assert ours == {
        "jaxrl_post.losses", "jaxrl_post.losses.ratios", "jaxrl_post.metrics"
    }  # fmt: skip


def run(path: Path, into: Path, *options: str) -> subprocess.CompletedProcess[str]:
    tool = ROOT / "tools" / "notebooks.py"
    return subprocess.run(
        [sys.executable, str(tool), str(path), f"--into={into}", *options],
        capture_output=True,
        text=True,
        timeout=1200,
    )


# tests/launch/test_agents_guide.py trains the agent of the one for two steps and runs
# its cells; the losses of the others have tests of their own.
@needs_extra
@pytest.mark.all
@pytest.mark.processes
@each_notebook
def test_runs_afresh(path, tmp_path):
    # A minute alone, and several with other tests running.
    result = run(path, tmp_path, "--cell-timeout=900")
    assert (result.returncode, result.stderr) == (0, "")
    fresh = code_cells(tmp_path / path.name)
    committed = code_cells(path)
    assert [source(cell) for cell in fresh] == [source(cell) for cell in committed]
    assert [kinds(cell) for cell in fresh] == [kinds(cell) for cell in committed]


def notebook_of(code: str, path: Path) -> None:
    cell = {
        "cell_type": "code", "id": "only", "source": code, "metadata": {},
        "outputs": [], "execution_count": None,
    }  # fmt: skip
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))


@needs_extra
@pytest.mark.all
@pytest.mark.processes
def test_what_a_cell_prints_is_one_output_whenever_it_is_printed(tmp_path):
    path = tmp_path / "slow.ipynb"
    notebook_of("import time; print(1, flush=True); time.sleep(1); print(2)", path)
    result = run(path, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    [cell] = code_cells(path)
    [output] = cell["outputs"]
    assert "".join(output["text"]) == "1\n2\n"


@needs_extra
@pytest.mark.all
@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("assert 1 + 1 == 3, 'not three'", "AssertionError: not three"),
        ("import warnings; warnings.warn('old')", "cell only must not write to std"),
        ("import time; time.sleep(60)", "Cell execution timed out"),
        ("import os; os._exit(3)", "Kernel died"),
    ],
    ids=["fails", "warns", "hangs", "dies"],
)
def test_a_broken_notebook_is_named_and_not_written(code, message, tmp_path):
    path = tmp_path / "bad.ipynb"
    notebook_of(code, path)
    into = tmp_path / "out"
    into.mkdir()
    result = run(path, into, "--cell-timeout=5")
    assert result.returncode == 1
    assert str(path) in result.stderr
    plain = re.sub(r"\x1b\[[\d;]*m", "", result.stderr)
    assert message in plain
    assert not list(into.iterdir())
