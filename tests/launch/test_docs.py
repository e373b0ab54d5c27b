"""Every code block of README.md and docs/ is run, read or compiled.

Commands are read by the options of their program. Python runs, in its page's order: a
block that begins with `# NAME.py` is that file, and the others share their names. Pages
whose blocks need a server or data have tests of their own, which name the page.
"""

import contextlib
import importlib
import io
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import WatchConfig
from jaxrl_post.envs import Answer
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.programs.watching.guard import open_watch
from launch import cli, doctor

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
BLOCKS = [
    (name, language, "\n".join(line[len(indent) :] for line in code.splitlines()))
    for name, text in PAGES.items()
    for indent, language, code in FENCED.findall(text)
]

# Python that other tests run, by page.
RUN_ELSEWHERE = {
    "docs/how-to/agents.md": "tests/launch/test_agents_guide.py",
    "docs/how-to/algorithms.md": "tests/launch/test_algorithms_guide.py",
    "docs/how-to/jetstream.md": "tests/serve/jetstream/test_guide.py",
    "docs/how-to/judges.md": "tests/launch/test_judges_guide.py",
    "docs/how-to/serving.md": "tests/launch/test_serving_guide.py",
    "docs/tutorials/notebook.md": "tests/architecture/test_readme.py",
    "README.md": "tests/architecture/test_readme.py",
}
# Beginnings of lines of shell, apart from programs of `launch` and `make`.
OTHERS = (
    ". .venv/bin/activate", "for index in", "done; wait", "python -m venv ",
    "kubectl apply -f launch/pods/", "pip install ", ".venv/bin/pip install ",
    "docker build -f launch/pods/Dockerfile ", "docker run ",
    "envs/verifiers/bin/",
)  # fmt: skip


def of(language: str) -> list[tuple[str, str]]:
    return [(name, code) for name, found, code in BLOCKS if found == language]


def lines(code: str) -> list[str]:
    """The commands of a block of shell: whole ones, without comments."""
    joined = code.replace("\\\n", " ").splitlines()
    return [line.strip() for line in joined if line.strip() and line.strip()[0] != "#"]


COMMANDS = [(name, line) for name, code in of("sh") for line in lines(code)]
PROGRAMS = [
    (name, line) for name, line in COMMANDS if re.search(r"\blaunch\.\w+ ", line)
]


def test_blocks_are_found():
    assert {"README.md", "docs/tutorials/pod.md"} <= {name for name, *_ in BLOCKS}
    # A fence that does not close, or a language without a check here, is a mistake.
    for name, text in PAGES.items():
        fences = len(re.findall(r"^ *```", text, re.MULTILINE))
        assert fences == 2 * sum(page == name for page, *_ in BLOCKS), name
    languages = {language for _, language, _ in BLOCKS}
    assert languages <= {"", "sh", "python", "json", "jsonl", "toml"}


def test_every_line_of_shell_is_known():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = extras["project"]["optional-dependencies"]
    for name, line in COMMANDS:
        if line.startswith("make "):
            target = shlex.split(line)[1]
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name}: {line}"
        elif (name, line) not in PROGRAMS:
            assert line.startswith(OTHERS), f"{name}: {line}"
        for asked in re.findall(r"(?:\.|jaxrl_post)\[([\w,]+)\]", line):
            assert set(asked.split(",")) <= extras.keys(), f"{name}: {line}"
        for file in re.findall(r"launch/pods/\w+(?:\.\w+)?", line):
            assert (ROOT / file).is_file(), f"{name}: {line}"


def test_there_is_a_command_of_every_program():
    programs = {re.search(r"launch\.(\w+)", line)[1] for _, line in PROGRAMS}
    there = {
        p.stem
        for p in (ROOT / "launch").glob("*.py")
        if "\nPROGRAM = " in p.read_text()
    }
    assert there <= programs
    named = {n for text in PAGES.values() for n in re.findall(r"\blaunch\.(\w+)", text)}
    assert {n for n in named if not (ROOT / "launch" / f"{n}.py").is_file()} <= {
        "NAME",
        "recipes",
    }


@pytest.mark.parametrize(
    ("name", "line"),
    PROGRAMS,
    ids=[f"{name}-{number}" for number, (name, _) in enumerate(PROGRAMS)],
)
def test_a_command_is_taken(name, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in re.findall(r"--(?:data\.(?:eval-)?path|input)[ =](\S+)", line):
        if not file.startswith("/"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
    for file in re.findall(r"key-file[ =](\S+)", line):
        (tmp_path / file).write_text("secret", encoding="utf-8")
    for file in re.findall(r"--config[ =](\S+)", line):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shown = [
            code for page, code in of("") if (page, code[2:].split()[0]) == (name, file)
        ]
        (tmp_path / file).write_text("".join(shown) or "{}", encoding="utf-8")
        for data in re.findall(r"path: (\w+\.jsonl)", "".join(shown)):
            (tmp_path / data).touch()
    for file in re.findall(r"--watch\.rules[ =](\S+)", line):
        [rules] = [code for page, code in of("toml") if page == name]
        (tmp_path / file).write_text(rules, encoding="utf-8")
    for file in re.findall(r"--suite[ =](\S+)", line):
        [suite] = [code for page, code in of("toml") if page == name]
        (tmp_path / file).write_text(suite, encoding="utf-8")
        for data in re.findall(r'path = "(\S+)"', suite):
            (tmp_path / data).touch()
    for file in re.findall(r"--against[ =](\S+)", line):
        (tmp_path / file).touch()
    for file in re.findall(r"--watch\.webhook[ =](\S+)", line):
        (tmp_path / file).write_text("https://example.com/hook", encoding="utf-8")
    # The model of `make smollm2`.
    (tmp_path / "models/SmolLM2-135M-Instruct").mkdir(parents=True, exist_ok=True)
    words = shlex.split(line.replace("$index &", "1"), comments=True)
    words = [word for word in words if word != "--dry-run"]
    place = next(i for i, word in enumerate(words) if word.startswith("launch."))
    program, options = importlib.import_module(words[place]).PROGRAM, words[place + 1 :]
    if words[place] == "launch.doctor":
        program, options = doctor.chosen(options)
    config = cli.read_options(program, options)
    if not line.startswith(("sbatch", "TPU=")):
        # The others name files of another machine.
        program.check(config)


@pytest.mark.parametrize(
    ("name", "code"), of("json") + of("jsonl"), ids=lambda each: str(each)[:40]
)
def test_json_is_json(name, code):
    try:
        json.loads(code)
    except ValueError:
        for line in code.splitlines():
            if line.strip() and line.strip() != "...":
                json.loads(line)


# Suites of evaluations are read with the commands that name them.
RULES = [block for block in of("toml") if "[[parts]]" not in block[1]]


@pytest.mark.parametrize(("name", "code"), RULES, ids=lambda each: each[:40])
def test_rules_are_read(name, code, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for page, python in of("python"):
        file = re.match(r"# (\w+)\.py\n", python)
        if page == name and file is not None:
            (tmp_path / f"{file[1]}.py").write_text(python, encoding="utf-8")
    path = tmp_path / "rules.toml"
    path.write_text(code, encoding="utf-8")
    watch = open_watch(RLConfig(watch=WatchConfig(rules=str(path))))
    assert tomllib.loads(code).keys() <= {rule.name for rule in watch.rules}


@pytest.mark.parametrize("name", sorted({name for name, _ in of("python")}))
def test_python_runs(name, tmp_path, monkeypatch):
    codes = [code for page, code in of("python") if page == name]
    for code in codes:
        compile(code, name, "exec")
    elsewhere = ROOT / RUN_ELSEWHERE.get(name, "none")
    if elsewhere.is_file():
        assert Path(name).name in elsewhere.read_text(encoding="utf-8")
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict = {"__name__": "page"}
    for code in codes:
        file = re.match(r"# (\w+)\.py\n", code)
        if file is None:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, name, "exec"), names)
        else:
            (tmp_path / f"{file[1]}.py").write_text(code, encoding="utf-8")
            importlib.import_module(file[1])


def test_a_page_that_is_run_elsewhere_is_there():
    assert RUN_ELSEWHERE.keys() <= PAGES.keys()


def tutorial(name: str, module: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Imports the file that a tutorial shows."""
    [code] = [c for page, c in of("python") if page == f"docs/tutorials/{name}.md"]
    assert code.startswith(f"# {module}.py\n")
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module(module)


def test_the_environment_of_the_tutorial(tmp_path, monkeypatch):
    tutorial("your-environment", "my_shop", tmp_path, monkeypatch)
    made = make_environment("my_shop:Shop", DataConfig(), ("my_shop:price",))
    task = made.tasks("eval")[3]
    session = made.open(task)
    call = made.demonstration(task)
    [result] = session.step(
        Answer("assistant", "", tool_calls=call.tool_calls)
    ).messages
    assert session.step(Answer("assistant", result.content)).reward == 1.0
    session.close()
    # After the call, the demonstration is the answer.
    task = made.tasks("train")[1]
    assert made.demonstration(task) == task.reference


def test_the_reward_of_the_tutorial(tmp_path, monkeypatch):
    close = tutorial("your-reward", "my_reward", tmp_path, monkeypatch).close
    found = [close(said, "7") for said in ("It is 7", "6", "no", "")]
    assert found == [1.0, 0.5, 0.0, 0.0]
