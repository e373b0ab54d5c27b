"""`launch.evaluate` on several environments, and against a baseline."""

import json

import pytest

from launch import cli, evaluate

pytestmark = pytest.mark.processes

SUITE = """
[[parts]]
name = "held"
env = "even_length:EvenLength?size=8"
constraints = [{metric = "failed", at_most = 0.5}]

[[parts]]
name = "drawn"
kind = "out-of-distribution"
env = "even_length:EvenLength?size=4"
split = "train"
samples = 3
temperature = 1.0
max_tokens = 7

[[parts.constraints]]
metric = "length"
at_least = 1
"""


def run(model, suite, output, *arguments: str) -> int:
    named = [] if suite is None else [f"--suite={suite}"]
    return evaluate.main(
        [f"--model={model}", "--max-tokens=5", f"--output={output}", *named, *arguments]
    )


def rows_of(output):
    lines = output.with_suffix(".completions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    file = tmp_path_factory.mktemp("suite") / "suite.toml"
    file.write_text(SUITE)
    return file


@pytest.fixture(scope="module")
def done(model, suite, tmp_path_factory):
    output = tmp_path_factory.mktemp("done") / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(__file__.rpartition("/")[0])
        assert run(model, suite, output) == 0
    return output


def test_a_part_is_what_it_is_alone(done, model, tmp_path):
    """The sampler is the same for all parts, and changes none of them."""
    found, rows = json.loads(done.read_text()), rows_of(done)
    assert [part["name"] for part in found["parts"]] == ["held", "drawn"]
    assert found["passed"] is True
    alone = {
        "held": ["--env=even_length:EvenLength?size=8"],
        "drawn": [
            "--env=even_length:EvenLength?size=4",
            *("--split=train", "--samples=3", "--temperature=1", "--max-tokens=7"),
        ],
    }
    own = {"name", "kind", "constraints", "config", "seconds"}
    for part in found["parts"]:
        name = part["name"]
        output = tmp_path / f"{name}.json"
        assert run(model, None, output, *alone[name]) == 0
        result = json.loads(output.read_text())
        assert {key: result[key] for key in part.keys() - own} == {
            key: part[key] for key in part.keys() - own
        }
        ours = [row for row in rows if row["part"] == name]
        assert [{"part": name, **row} for row in rows_of(output)] == ours
    assert [row["part"] for row in rows] == ["held"] * 8 + ["drawn"] * 12


def test_the_files_have_all_parts(done, suite, model):
    found = json.loads(done.read_text())
    held, drawn = found["parts"]
    assert (held["kind"], drawn["kind"]) == ("held-out", "out-of-distribution")
    assert (held["tasks"], drawn["tasks"], drawn["samples"]) == (8, 4, 12)
    assert held["config"]["env"] == "even_length:EvenLength?size=8"
    assert found["config"]["suite"] == str(suite)
    assert found["config"]["model"] == str(model)
    assert [each["verdict"] for each in held["constraints"]] == ["held"]
    assert drawn["sampling"]["max_tokens"] == 7
    assert held["against"] is None
    assert sum(map(len, drawn["by_task"].values())) == 12
    page = done.with_suffix(".html").read_text()
    assert "length at least 1" in page
    assert "out-of-distribution" in page


def test_the_same_model_is_the_same_as_its_baseline(
    done, suite, model, tmp_path, capsys
):
    output = tmp_path / "again.json"
    assert run(model, suite, output, f"--against={done}") == 0
    found = json.loads(output.read_text())
    for part in found["parts"]:
        against = part["against"]
        assert (against["verdict"], against["regressed"]) == ("same", False)
        assert (against["difference"], against["unpaired"]) == (0, 0)
        assert against["p_value"] == 1
    assert found["alone"] == []
    printed = capsys.readouterr().out
    assert "passed: no constraint is broken, and no part regressed" in printed


def better(file, tmp_path, change):
    """A copy of results in which the baseline's scores are changed."""
    content = json.loads(file.read_text())
    for part in content["parts"]:
        part["by_task"] = change(part["by_task"])
    copy = tmp_path / "baseline.json"
    copy.write_text(json.dumps(content))
    return copy


def test_a_regression_is_an_exit_status_and_is_written(
    done, suite, model, tmp_path, capsys
):
    baseline = better(done, tmp_path, lambda tasks: {t: [1] for t in tasks})
    output = tmp_path / "now.json"
    # No answer of the part solves its task.
    failing = ("--solved-reward=2", f"--against={baseline}")
    assert run(model, suite, output, *failing) == 1
    found = json.loads(output.read_text())
    assert found["passed"] is False
    for part in found["parts"]:
        assert (part["against"]["verdict"], part["against"]["regressed"]) == (
            ("worse", True)
        )
        assert part["against"]["interval"] == [-1, -1]
    assert found["parts"][0]["against"]["lost"] == 8
    printed = capsys.readouterr().out
    assert "error: failed 2 of 4:" in printed
    assert (
        "held, accuracy against the baseline: regressed; 100.0% to 0.0%: -100.0 points"
    ) in printed
    page = output.with_suffix(".html").read_text()
    assert "the baseline solved it" in page
    # With the largest margin there is no drop that counts.
    lenient = tmp_path / "lenient.json"
    assert run(model, suite, lenient, *failing, "--against-margin=1") == 0


def test_tasks_and_parts_of_one_side_are_told(done, model, tmp_path, capsys):
    baseline = better(
        done, tmp_path, lambda tasks: {**dict([*tasks.items()][1:]), "other": [1]}
    )
    suite = tmp_path / "suite.json"
    env = {"env": "even_length:EvenLength?size=8"}
    parts = [{"name": "held", **env}, {"name": "new", "num_tasks": 2, **env}]
    suite.write_text(json.dumps({"parts": parts}))
    # Under another name a part might have regressed unseen.
    assert run(model, suite, tmp_path / "now.json", f"--against={baseline}") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "has the parts drawn, and this evaluation has the parts held, new" in printed
    assert not (tmp_path / "now.json").exists()
    content = json.loads(baseline.read_text())
    content["parts"] = [each for each in content["parts"] if each["name"] == "held"]
    baseline.write_text(json.dumps(content))
    assert run(model, suite, tmp_path / "now.json", f"--against={baseline}") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 tasks are in one of the two evaluations alone" in printed
    assert "so it is not compared" in printed


def test_a_broken_constraint_is_an_exit_status(model, tmp_path, capsys):
    suite = tmp_path / "suite.json"
    constraints = [
        {"metric": "length", "at_most": 0.5},
        {"metric": "lenth", "at_least": 0},
    ]
    part = {"name": "a", "env": "even_length:EvenLength", "constraints": constraints}
    suite.write_text(json.dumps({"parts": [part]}))
    output = tmp_path / "results.json"
    assert run(model, suite, output) == 1
    found = json.loads(output.read_text())
    assert [each["verdict"] for each in found["parts"][0]["constraints"]] == (
        ["broken", "broken"]
    )
    printed = capsys.readouterr().out
    assert "a, length at most 0.5: broken; " in printed
    assert "a, lenth at least 0: broken; not measured; there are accuracy, " in printed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"env": "no_such_module:Make"}, "suite.json: part b: --env: "),
        ({"env": "even_length:EvenLength?size=0"}, "part b: --env: even-length has no"),
        ({"max_tokens": 60}, "part b: --max-tokens: a prompt and its completion must"),
        ({"data": {"path": "FILE"}}, "part b: --data.path: the environment"),
    ],
)
def test_nothing_is_sampled_if_a_part_cannot_be(
    changed, message, model, tmp_path, capsys
):
    (tmp_path / "FILE").write_text("{}")
    if "data" in changed:
        changed = {"data": {"path": str(tmp_path / "FILE")}}
    suite, output = tmp_path / "suite.json", tmp_path / "results.json"
    part = {"name": "a", "env": "even_length:EvenLength"}
    suite.write_text(json.dumps({"parts": [part, {**part, "name": "b", **changed}]}))
    assert run(model, suite, output) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert message in printed
    assert "accuracy" not in printed
    assert not output.exists()


def test_a_baseline_of_other_tasks_is_refused_before_the_model_is_opened(
    done, suite, tmp_path, capsys
):
    baseline = better(done, tmp_path, lambda tasks: {"other": [1]})
    # No such model.
    output = tmp_path / "results.json"
    assert run(tmp_path / "none", suite, output, f"--against={baseline}") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "has 1 tasks of part held, and none has the prompt of one of the 8" in (
        printed
    )


def test_the_tokenizer_of_a_preset_is_made_for_all_parts(tmp_path):
    suite = tmp_path / "suite.json"
    parts = [
        {"name": "sums", "env": "arithmetic?level=1", "num_tasks": 2},
        {"name": "letters", "env": "guess", "max_turns": 2, "max_prompt_tokens": 80},
    ]
    suite.write_text(json.dumps({"parts": parts}))
    output = tmp_path / "results.json"
    assert run("demo", suite, output, "--num-tasks=3") == 0
    found = json.loads(output.read_text())
    assert [part["samples"] for part in found["parts"]] == [2, 3]
    prompts = {row["part"]: row["prompt"] for row in rows_of(output)}
    assert "�" not in prompts["letters"]


def test_a_dry_run_reads_the_suite(suite, tmp_path, capsys):
    arguments = ["--model=demo", f"--suite={suite}", "--dry-run"]
    assert cli.call(evaluate.PROGRAM, arguments) == 0
    assert json.loads(capsys.readouterr().out)["suite"] == str(suite)
    broken = tmp_path / "suite.toml"
    broken.write_text(SUITE.replace("samples", "smaples"))
    assert cli.call(evaluate.PROGRAM, [*arguments, f"--suite={broken}"]) == 1
    assert "part drawn: unknown key 'smaples'; did you mean samples" in (
        " ".join(capsys.readouterr().out.split())
    )
