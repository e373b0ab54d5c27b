"""The measurement of an accelerator: every part runs, and a call continues the last."""

import importlib.metadata
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
import tyro

from benchmarks.accelerator.__main__ import main
from benchmarks.accelerator.lines import Lines, read
from benchmarks.accelerator.parts import PARTS, Part
from benchmarks.ideal import dense_model
from benchmarks.kernel_cases import Selection, cases
from jaxrl_post.pretrained.presets import PRESETS
from launch import cli, grpo
from tests import compiled

ROOT = Path(__file__).parents[2]
# Packages of a machine without a network, as tools/wheels.sh says, and some that its
# other programs brought. What these need is there too.
IMAGE = {
    *("jax", "flax", "optax", "orbax-checkpoint", "tokenizers", "safetensors"),
    *("jinja2", "rich", "cloudpickle", "narwhals"),
    *("attrs", "jaxtyping", "pillow", "psutil", "setuptools"),
}
# Parts with other arguments of a program that runs in a part before them.
AGAIN = ("rollout_8b", "states", "float32")
# Notes which modules a program has loaded, when it ends.
NOTE = """
import atexit, os, sys
def note():
    names = {name.partition(".")[0] for name in sys.modules}
    with open(os.path.join(FOLDER, str(os.getpid())), "w") as file:
        file.write("\\n".join(sorted(names)))
atexit.register(note)
"""


def part(name: str, *lines: str, seconds: int = 60) -> Part:
    command = " ".join(["tests.benchmarks.measured", "{json}", *lines])
    return Part(name, "Does it?", seconds, command)


def records(folder: Path) -> dict[str, dict]:
    return {path.stem: read(path) for path in folder.glob("*.json")}


def begun(folder: Path) -> list[str]:
    """Lines that were begun since the last question."""
    file = folder / "begun"
    found = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return found


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are cut end at once."""
    monkeypatch.setattr("benchmarks.accelerator.__main__.GRACE", 0.1)


@pytest.mark.processes
@pytest.mark.slow("waits for parts to be cut, and asks for the device in three calls")
@pytest.mark.usefixtures("short")
def test_a_call_continues_the_last(tmp_path, capsys):
    """A cut part's missing lines, no part that is done, and failed ones last.

    The line at which a part was cut comes after the others.
    """
    parts = [
        part("broken", "one", "error"),
        part("cut", "one", "waits", "two", seconds=5),
        part("wrong", "one", "wrong"),
        part("stuck", "waits", seconds=2),
        part("done", "one"),
        part("long", "one", seconds=10_000),
    ]
    assert main([str(tmp_path), "--seconds", "300"], parts) == 1
    said = capsys.readouterr().out
    found = records(tmp_path)
    assert {name: record["status"] for name, record in found.items()} == {
        "broken": "failed",
        "cut": "cut",
        "wrong": "failed",
        "stuck": "failed",
        "done": "done",
    }
    assert found["broken"]["said"] == ['{"name": "one"}', "no such kernel"]
    assert found["cut"]["said"][-1] == "stopped after 5 s of 5 s"
    assert [row["name"] for row in found["cut"]["rows"]] == ["one"]
    assert "== long: not now" in said
    for line in (
        r"broken +failed +\d+ s  1 lines",
        r"cut +cut +\d+ s  1 lines",
        r"wrong +failed +\d+ s  2 lines, 1 failed",
        r"done +done +\d+ s  1 lines",
        r"long +not begun",
    ):
        assert re.search(rf"(?m)^{line}$", said), line
    for record in found.values():
        assert record["device"] == record["versions"]["device"] == "cpu"
        assert record["versions"]["jax"] == importlib.metadata.version("jax")
        assert record["date"] == time.strftime("%Y-%m-%d")
        assert record["took_s"] > 0
        assert record["calls"] == 1
    begun(tmp_path)

    (tmp_path / "free").touch()
    assert main([str(tmp_path), "--seconds", "300"], parts) == 1
    assert begun(tmp_path) == [
        "cut two",
        "cut waits",
        "broken error",
        "wrong wrong",
        "stuck waits",
    ]
    found = records(tmp_path)
    assert [row["name"] for row in found["cut"]["rows"]] == ["one", "two", "waits"]
    assert found["cut"]["status"] == found["stuck"]["status"] == "done"
    assert found["cut"]["calls"] == 2
    assert found["done"]["calls"] == 1

    # With other versions a part is measured again; named parts come in their order.
    (tmp_path / "done.json").write_text(
        json.dumps(found["done"] | {"versions": {"jax": "0.1"}})
    )
    changed = found["cut"] | {"sources": "others"}
    (tmp_path / "cut.json").write_text(json.dumps(changed))
    capsys.readouterr()
    assert main([str(tmp_path), "done", "cut"], parts) == 0
    assert begun(tmp_path) == ["done one"]
    assert records(tmp_path)["done"]["calls"] == 1
    said = capsys.readouterr().out
    assert re.search(r"cut +done .*\(other sources: remove its file", said)


@pytest.mark.processes
def test_results_of_another_device_are_not_mixed(tmp_path, capsys):
    record = {"device": "NVIDIA H200", "status": "done"}
    (tmp_path / "right.json").write_text(json.dumps(record))
    assert main([str(tmp_path), "one"], [part("one", "a")]) == 2
    told = capsys.readouterr().err
    assert "right.json is of NVIDIA H200, and this is of cpu: take another" in told
    assert not begun(tmp_path)


def test_an_unknown_part_is_refused(tmp_path, capsys):
    assert main([str(tmp_path), "right", "speeds"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("no part 'speeds'; there are right, agreement, step,")
    assert not [*tmp_path.iterdir()]


@pytest.mark.processes
def test_a_call_that_is_ended_stops_its_part(tmp_path):
    """It keeps what was measured, and the next call continues there."""
    program = (
        "import signal, sys\n"
        "from benchmarks.accelerator.__main__ import main\n"
        "from tests.benchmarks.test_accelerator import part\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"sys.exit(main([{str(tmp_path)!r}], [part('one', 'a', 'waits')]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 120
    while "one waits" not in begun(tmp_path):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    record = records(tmp_path)["one"]
    assert record["status"] == "cut"
    assert [row["name"] for row in record["rows"]] == ["a"]
    (tmp_path / "free").touch()
    assert main([str(tmp_path)], [part("one", "a", "waits")]) == 0
    assert begun(tmp_path) == ["one waits"]


def test_lines_of_other_facts_are_dropped(tmp_path):
    path = tmp_path / "lines.json"
    lines = Lines(path, {"dtype": "float32", "shapes": ("a", "b")}, ("name", "by"))
    keys = [("x", "one"), ("x", "two"), ("y", "one")]
    lines.begin("x")
    lines.add({"name": "x", "by": "one", "ms": 1.0})
    lines.add({"name": "x", "by": "two", "failed": "differs"})
    again = Lines(path, {"dtype": "float32", "shapes": ["a", "b"]}, ("name", "by"))
    # It failed, and the run ended at this name.
    assert again.missing(keys) == [("y", "one"), ("x", "two")]
    again.end()
    assert read(path)["rows"] == [{"name": "x", "by": "one", "ms": 1.0}]
    other = Lines(path, {"dtype": "bfloat16", "shapes": ("a", "b")}, ("name", "by"))
    assert other.missing(keys) == keys
    path.write_text('{"dtype": "float32", "sha')
    assert Lines(path, {"dtype": "float32"}, ("name",)).rows == []


def test_every_part_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    for part in PARTS:
        assert re.search(rf"(?m)^  {part.name} +{part.seconds} s  \w.*[?]$", told)
        # A call of nine minutes has room for any two.
        assert part.seconds <= 250


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_arguments_for_a_device_are_known(part):
    """A dry run adds others, which hide the names of models and shapes."""
    _, _, module, *arguments = part.arguments(Path("out"), dry=False)
    if module == "launch.grpo":
        config = cli.read_options(grpo.PROGRAM, arguments)
        assert config.run_dir == f"out/{part.name}"
        return
    program = importlib.import_module(module)
    options = tyro.cli(program.Options, args=arguments)
    assert options.json == Path(f"out/{part.name}.json")
    if module == "benchmarks.kernels":
        chosen = options.operations, options.shapes, options.packs, jnp.bfloat16
        found = {(case.operation, case.shape) for case in cases(Selection(*chosen))}
        assert {name for name, _ in found} == set(options.operations)
        for name in options.shapes:
            assert any(shape.startswith(name) for _, shape in found), name
    elif module == "benchmarks.accelerator.agreement":
        assert PRESETS.keys() >= set(options.shapes)
    else:
        assert dense_model(options.shape).vocab_size > 100_000


def run_dry(folder: Path, names: tuple[str, ...]) -> tuple[int, set[str]]:
    """Runs parts dry; returns the exit status, and modules that they loaded."""
    hook, loaded = folder / "hook", folder / "loaded"
    hook.mkdir()
    loaded.mkdir()
    (hook / "sitecustomize.py").write_text(f"FOLDER = {str(loaded)!r}\n{NOTE}")
    cache = compiled.borrow()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
        patch.setenv("PYTHONPATH", str(hook))
        status = main([str(folder), *names, "--dry", "--seconds", "20000"])
    compiled.give_back(cache, ended_well=status == 0)
    files = [file.read_text() for file in loaded.iterdir()]
    return status, {name for text in files for name in text.split()}


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory):
    """Exit status and records of a dry run, and the modules that it loaded."""
    folder = tmp_path_factory.mktemp("dry")
    names = tuple(part.name for part in PARTS if part.name not in AGAIN)
    status, loaded = run_dry(folder, names)
    return status, records(folder), loaded


def require_done(status: int, found: dict[str, dict]) -> None:
    told = {name: (record["status"], record["said"]) for name, record in found.items()}
    assert status == 0, told
    for record in found.values():
        assert record["dry"] is True
        assert record["status"] == "done"
        assert {"date", "device", "versions", "machine", "took_s"} <= record.keys()


@pytest.mark.processes
@pytest.mark.slow("starts the programs of the measurement, and interprets kernels")
def test_parts_run_dry(dry):
    """Kernels are interpreted; where they are timed, XLA's programs stand in."""
    status, found, _ = dry
    require_done(status, found)
    assert found.keys() | {*AGAIN} == {part.name for part in PARTS}
    by = {(row["operation"], row["by"]): row for row in found["right"]["rows"]}
    operations = {"attention", "decode_attention", "next_token", "token_logprob"}
    assert {name for name, by in by if by == "pallas_gpu"} == operations
    assert all(row["same_bits"] for row in by.values())
    assert {row["by"] for row in found["speed"]["rows"]} == {"xla", "cudnn"}
    assert all(row["ms"] > 0 for row in found["speed"]["rows"])
    checks = {row["check"]: row for row in found["agreement"]["rows"]}
    assert checks["exact, bfloat16"]["unequal"] == 0
    assert checks["CPU, float32"]["gradient"] == 0
    assert found["rollout"]["runs"][0]["step_seconds"] > 0
    assert found["step"]["seconds"]["step"] > 0
    assert "reward" in "\n".join(found["demo"]["said"])


@pytest.mark.all
@pytest.mark.processes
@pytest.mark.slow("starts programs of the measurement")
def test_parts_with_other_arguments_run_dry(tmp_path):
    """`test_parts_run_dry` guards their programs in `make test`."""
    status, _ = run_dry(tmp_path, AGAIN)
    found = records(tmp_path)
    require_done(status, found)
    assert found.keys() == {*AGAIN}
    assert {row["by"] for row in found["float32"]["rows"]} == {"xla"}
    assert all("failed" not in row for row in found["states"]["rows"])


@pytest.mark.processes
def test_the_wheels_are_what_the_parts_need(dry):
    """Beyond what the image has, parts load packages that tools/wheels.sh downloads."""
    _, _, names = dry
    script = (ROOT / "tools" / "wheels.sh").read_text().replace("\\\n", " ")
    (listed,) = re.findall(r"for name in ([^;]+);", script)
    wheels = set(listed.split())
    there = {*IMAGE, *wheels}
    for name in IMAGE:
        there |= needed(name)
    of_module = importlib.metadata.packages_distributions()
    loaded = {normal(name) for top in names for name in of_module.get(top, ())}
    assert loaded - there <= {"jaxrl-post"}
    # Each is loaded, or a package that is loaded asks for it.
    assert wheels <= loaded.union(*(needed(name) for name in loaded & wheels))


def needed(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """Names of the packages that a package needs, and what they need."""
    found = {normal(name)}
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    for line in lines:
        other = normal(re.split(r"[ <>=!~;\[(]", line, maxsplit=1)[0])
        if "extra ==" not in line and other not in seen | found:
            found |= needed(other, seen | found)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
