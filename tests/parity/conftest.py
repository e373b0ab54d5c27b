"""Folders of the fixtures.

`make parity` writes fresh ones with torch and transformers and passes their directory;
without the option the committed ones serve.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent

# These run in an environment with torch, not in this one.
collect_ignore = [
    "check_saved.py",
    "check_trained.py",
    "fuzz_theirs.py",
]
collect_ignore_glob = ["make_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-fixtures",
        type=Path,
        help="directory that tests/parity/make_fixtures.py wrote",
    )
    parser.addoption(
        "--vision-fixtures",
        type=Path,
        help="directory that tests/parity/make_vision_fixtures.py wrote",
    )
    parser.addoption(
        "--parity-model", type=Path, help="directory of SmolLM2-135M-Instruct"
    )
    parser.addoption(
        "--parity-expected",
        type=Path,
        help="directory that tests/parity/smollm2/theirs.py wrote of it",
    )


@pytest.fixture(scope="session")
def vision_fixtures(request: pytest.FixtureRequest) -> Path:
    given = request.config.getoption("--vision-fixtures", default=None)
    return given or HERE / "vision_fixtures"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "checkpoint" not in metafunc.fixturenames:
        return
    root = metafunc.config.getoption("--parity-fixtures", default=None)
    folders = sorted(
        path.parent for path in (root or HERE / "fixtures").glob("*/*.npz")
    )
    if not folders:
        raise pytest.UsageError(f"--parity-fixtures: no checkpoints under {root}")
    metafunc.parametrize("checkpoint", folders, ids=[path.name for path in folders])
