"""The package as it is installed from a wheel, elsewhere than in its clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PACKAGES = ("jaxrl_post", "launch")
# Python leaves these in the folders.
LEFT = {"__pycache__"}


def ran(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the clone, built without an index."""
    clone, target = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(*LEFT)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, clone / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, clone / name)
    ran(
        sys.executable, "-m", "pip", "wheel", ".", f"--wheel-dir={target}",
        "--no-deps", "--no-build-isolation", "--no-index",
        folder=clone,
    )  # fmt: skip
    [found] = target.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder in which the wheel is installed."""
    target = tmp_path_factory.mktemp("site")
    ran(
        sys.executable, "-m", "pip", "install", str(wheel), f"--target={target}",
        "--no-deps", "--no-index", "--no-compile",
        folder=target,
    )  # fmt: skip
    return target


def test_every_file_of_the_packages_is_in_the_wheel(wheel):
    files = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not LEFT & {*path.parts}
    }
    assert any(name.endswith(".toml") for name in files)
    assert files - {*zipfile.ZipFile(wheel).namelist()} == set()


def test_its_programs_run_elsewhere(installed, tmp_path):
    place = {"PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu"}
    words = ("-m", "launch.grpo", "--recipe=jsonl", "--help")
    told = ran(sys.executable, *words, folder=tmp_path, **place)
    assert told.startswith("usage: python -m launch.grpo")
    code = (
        "from jaxrl_post.extras import install; "
        "from jaxrl_post.records.metric_table import rows; "
        "from launch.recipes.own_files import jsonl; "
        "print(len(rows())); print(jsonl().data.path); print(install('hub'))"
    )
    told = ran(sys.executable, "-c", code, folder=tmp_path, **place)
    count, data, hint = told.splitlines()
    assert int(count) > 100
    assert Path(data).is_relative_to(installed)
    assert Path(data).is_file()
    assert hint == "pip install 'jaxrl_post[hub]'"


def test_the_extras_are_installed_from_a_clone_by_its_folder(tmp_path, monkeypatch):
    from jaxrl_post.extras import install

    monkeypatch.chdir(ROOT)
    assert install("hub") == "pip install -e '.[hub]'"
    monkeypatch.chdir(tmp_path)
    assert install("hub") == f"pip install -e '{ROOT}[hub]'"
