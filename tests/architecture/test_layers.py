"""The layers of ARCHITECTURE.md, and what an import may do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "jaxrl_post").rglob("*.py"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.processes
def test_imports_only_point_down():
    finished = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert finished.returncode == 0, finished.stdout
    assert "0 broken" in finished.stdout


# Third parties come first: what they do at import is theirs.
NO_SIDE_EFFECTS = """
import importlib, logging, os, pkgutil, signal, sys
import flax.struct, grain, jax, jax.numpy, jaxtyping, optax, orbax.checkpoint
import jax.experimental.pallas.mosaic_gpu
import rich.console, safetensors, tensorboardX, tokenizers, tyro
from jax._src import xla_bridge

def state():
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    root = logging.getLogger()
    return dict(os.environ), dict(jax.config.values), handlers, root.level, \\
        list(root.handlers), os.getcwd(), list(sys.path)

before = state()
import {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    importlib.import_module(module.name)
assert state() == before
assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.processes
@pytest.mark.parametrize("package", ["jaxrl_post", "launch"])
def test_no_import_has_a_side_effect(package):
    finished = run(sys.executable, "-c", NO_SIDE_EFFECTS.format(package=package))
    assert finished.returncode == 0, finished.stderr
    assert (finished.stdout, finished.stderr) == ("", "")


@pytest.mark.processes
def test_fine_tuning_loads_neither_sampler_nor_rollout():
    program = (
        "import sys, launch.sft\n"
        "launch.sft.PROGRAM.load()\n"
        "print(*(name for name in sys.modules if name.startswith('jaxrl_post.')))\n"
    )
    finished = run(sys.executable, "-c", program)
    assert finished.returncode == 0, finished.stderr
    loaded = finished.stdout.split()
    assert "jaxrl_post.programs.offline" in loaded
    parts = {name.split(".")[1] for name in loaded}
    assert parts.isdisjoint({"sampler", "rollout"})


def test_no_folder_is_a_bag():
    """At most 20 files and 16 % of the package's lines."""
    lines: dict[Path, list[int]] = {}
    for path in FILES:
        number = len(path.read_text().splitlines())
        lines.setdefault(path.parent, []).append(number)
    total = sum(sum(numbers) for numbers in lines.values())
    for folder, numbers in lines.items():
        assert len(numbers) <= 20, folder
        assert sum(numbers) <= 0.16 * total, folder


@pytest.mark.processes
def test_environments_never_load_jax():
    program = (
        "import sys, jaxrl_post.envs, jaxrl_post.envs.workers.worker\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'jax', 'jaxlib', 'flax', 'jaxtyping', 'numpy'}, loaded"
    )
    finished = run(sys.executable, "-c", program)
    assert finished.returncode == 0, finished.stderr


def talks(tree: ast.AST) -> list[int]:
    """Lines that print, or that look at the environment of the process."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("print")):
                lines.append(node.lineno)
            case ast.Attribute(ast.Name("os"), "environ" | "getenv" | "putenv"):
                lines.append(node.lineno)
            case ast.ImportFrom(module="os", names=names):
                if {"environ", "getenv", "putenv"} & {name.name for name in names}:
                    lines.append(node.lineno)
    return sorted(lines)


def test_what_counts_as_talking():
    program = (
        "import os\nprint(1)\nos.environ['A']\nos.getenv('A')\nfrom os import environ\n"
        "console.print(2)\nos.fsync(3)\nfrom os import path\n"
    )
    assert talks(ast.parse(program)) == [2, 3, 4, 5]


def test_the_library_neither_prints_nor_reads_the_environment():
    assert len(FILES) > 60
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        # Programs of their own, which the library has another Python run.
        if path.parts[-2:] not in {("sandbox", "inside.py"), ("sql", "inside.py")}
        for line in talks(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found
