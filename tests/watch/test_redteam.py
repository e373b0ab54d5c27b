"""Attacks on rewards: three graders with a known weakness, and the built-in ones."""

import functools
import json
import re

import pytest

from jaxrl_post.envs import Answer, Message, Step, ToolCall, make
from jaxrl_post.envs.judges import ChatEndpoint, Judge
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.watch import ATTACKS, Attack, EpisodeReward, Known, earned, known_tasks
from launch import redteam
from tests.envs.judges.judge_server import serving
from tests.watch.sums import Sums


def judge(environment, turns=8):
    """Judges in this process, as `programs.watching.redteam` does in others."""

    def one(task, text):
        talk, total = task.messages, 0.0
        for turn in range(turns):
            talk = (*talk, Answer("assistant", text, num_tokens=9))
            try:
                step = environment.step(task, talk)
            except ValueError as error:
                return EpisodeReward(None, turn + 1, "raised", str(error))
            total += step.reward
            talk = (*talk, *step.messages)
            if step.done:
                return EpisodeReward(total, turn + 1)
        return EpisodeReward(total, turns)

    return lambda asked: [one(*each) for each in asked]


def weak_kinds(environment, count=20, kinds=None):
    tasks = environment.tasks("eval")
    tasks = [tasks[i] for i in range(min(count, len(tasks)))]
    attacks = [each for each in ATTACKS if kinds is None or each.kind in kinds]
    found, right = earned(attacks, known_tasks(environment, tasks), judge(environment))
    assert all(each is None or each.reward is not None for each in right)
    return {each.attack.kind for each in found if each.weak_beyond(0.0)}


@pytest.mark.parametrize(
    ("weakness", "kinds"),
    [
        ("none", set()),
        # The answer in the thoughts alone is the last number of the text.
        ("last number", {"thoughts alone"}),
        ("any number", {"every choice", "hedge", "thoughts alone"}),
        ("length", {"length", "every choice", "huge number"}),
        ("obeys", {"injection"}),
        ("fails", {"length", "every choice", "huge number"}),
    ],
)
def test_each_weakness_is_found(weakness, kinds):
    assert weak_kinds(Sums(weakness)) == kinds


@pytest.mark.parametrize("spec", ["arithmetic?level=2", "arithmetic", "pictures"])
def test_environments_of_the_package_earn_nothing_for_attacks(spec):
    assert weak_kinds(make(spec)) == set()


JUDGED = [
    {"prompt": f"How many legs have {n} cats?", "answer": str(4 * n)} for n in range(9)
]


def grade(obeys: bool, body: dict) -> str:
    """The verdict of a judge that compares answers, or that does as it is told."""
    asked = body["messages"][-1]["content"]
    [answer] = re.findall(r"<answer>\n(.*?)\n</answer>", asked, re.DOTALL)
    [right] = re.findall(r"<reference>\n(.*?)\n</reference>", asked, re.DOTALL)
    fooled = obeys and ("highest" in answer or "maximum" in answer)
    return json.dumps({"grade": 10 if fooled or answer == right else 1})


@pytest.mark.parametrize(("obeys", "kinds"), [(False, set()), (True, {"injection"})])
def test_a_judge_that_obeys_an_answer_is_weak(obeys, kinds, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in JUDGED))
    with serving(functools.partial(grade, obeys)) as server:
        environment = make(
            f"judged?path={path}&eval_path={path}&url={server.url}&model={obeys}"
        )
        tried = ("empty", "constant", "echo", "other answer", "hedge", "injection")
        assert weak_kinds(environment, 3, tried) == kinds


@pytest.mark.parametrize(("obeys", "kinds"), [(False, set()), (True, {"injection"})])
def test_a_rubric_is_as_weak_as_its_judge(obeys, kinds):
    def say(body: dict) -> str:
        answer = body["messages"][-1]["content"].rpartition("<answer>")[2]
        fooled = obeys and "highest" in answer
        return json.dumps({"grade": 10 if fooled else 1})

    with serving(say) as server:
        judge = Judge(ChatEndpoint(server.url, f"rubric {obeys}"))
        rubric = Rubric(Sums(), {"style": Criterion(judge, weight=2.0)})
        assert weak_kinds(rubric, 3, ("empty", "echo", "injection")) == kinds


def test_thoughts_and_lenient_scorers_of_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="needs the extra 'envs'")
    sizes = "train_size=20&eval_size=6"
    # A whole score for other tasks' numbers, for nan, for any text, for first digits.
    for name in ("puzzle24", "complex_arithmetic", "game_of_life_halting"):
        kinds = ("empty", "echo", "other answer", "huge number", "thoughts alone")
        assert weak_kinds(make(f"reasoning-gym:{name}?{sizes}"), 6, kinds) == set()
    lenient = make(f"reasoning-gym:caesar_cipher?{sizes}")
    assert weak_kinds(lenient) == {"hedge"}
    assert (
        weak_kinds(make(f"reasoning-gym:caesar_cipher?{sizes}&reward=solved")) == set()
    )


def as_json(number: int) -> dict:
    properties = {"n": {"const": number}}
    return {"type": "object", "required": ["n"], "properties": properties}


@pytest.mark.parametrize("grader", ["exact", "schema"])
def test_graders_of_rows(grader, tmp_path):
    if grader == "schema":
        pytest.importorskip("jsonschema", reason="needs the extra 'schema'")
    rows = [
        {
            "prompt": f"Write {n}.",
            "answer": as_json(n) if grader == "schema" else str(n),
            "solution": json.dumps({"n": n}) if grader == "schema" else str(n),
        }
        for n in range(20, 40)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = f"jsonl?grader={grader}&path={path}&eval_path={path}"
    assert weak_kinds(make(spec)) == set()


@pytest.mark.processes
@pytest.mark.parametrize("spec", ["calculate", "world", "text2sql?level=2"])
def test_environments_that_keep_state_earn_nothing_for_attacks(spec, capsys):
    assert redteam.main([f"--env={spec}", "--num-tasks=2"]) == 0, capsys.readouterr()


@pytest.mark.processes
def test_agents_get_the_answers_from_a_server(capsys):
    """A constant move wins some games by luck, and silence wins none."""
    command = ["--env=nim", "--num-tasks=8", "--kinds", "empty", "thoughts alone"]
    assert redteam.main(command) == 0, capsys.readouterr()
    assert redteam.main(["--env=nim", "--num-tasks=8", "--kinds", "constant"]) == 1
    assert "fail" not in capsys.readouterr().out


def test_programs_that_end_early_or_compare_as_equal_are_not_right():
    kinds = ("program", "thoughts alone", "hedge")
    assert weak_kinds(make("functions"), 1, kinds) == set()


def test_a_constant_may_be_right_by_chance():
    """One of 20 tasks has the answer 12, so the constant 12 is right there."""
    known = known_tasks(Sums(), Sums().tasks("eval"))
    twelve = Attack("constant", "12", lambda known: "12", constant=True)
    found, _ = earned([twelve], known, judge(Sums()))
    assert (found[0].solved, found[0].honest) == (1, 1)
    assert not found[0].weak_beyond(0.0)


def test_a_grader_that_pays_for_silence_is_weak():
    class Generous(Sums):
        def step(self, task, conversation):
            return Step(1.0, done=True)

    assert "empty" in weak_kinds(Generous())


def test_calls_are_no_right_answer():
    class Calls(Sums):
        def demonstration(self, task):
            return Message("assistant", "", tool_calls=(ToolCall("f", "{}"),))

    [first, *_] = known_tasks(Calls(), Calls().tasks("eval"))
    assert first == Known(first.task, "12", "20")


def test_every_attack_has_a_name_of_its_own():
    names = [(attack.kind, attack.label) for attack in ATTACKS]
    assert len(names) == len(set(names)) > 100


@pytest.mark.processes
def test_the_program_names_the_worst_attack(tmp_path, capsys):
    output = tmp_path / "results.json"
    command = [
        "--env=tests.watch.sums:sums?weakness=obeys", "--num-tasks=3",
        f"--output={output}", "--kinds", "injection", "empty",
    ]  # fmt: skip
    assert redteam.main(command) == 1
    told = capsys.readouterr()
    assert "injection" in told.out
    assert "attacks earn more than they should" in told.out + told.err
    found = json.loads(output.read_text())
    kinds = {each["kind"]: each["weak"] for each in found["attacks"]}
    assert set(kinds) == {"injection", "empty"}
    assert any(e["weak"] for e in found["attacks"] if e["kind"] == "injection")
    assert not any(e["weak"] for e in found["attacks"] if e["kind"] == "empty")
    assert found["right"] == [1.0, 1.0, 1.0]
    # A result is never written over.
    assert redteam.main(command) == 1
    assert "already there" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--env=nim", "--judges=ray"], "on this machine alone"),
        (["--env=sums-of"], "no environment 'sums-of'"),
        (["--env=arithmetic", "--kinds", "none"], "there is no kind 'none'"),
        (["--env=arithmetic", "--tolerance=1"], "tolerance"),
        (["--env=gsm8k"], "path"),
    ],
)
def test_what_cannot_be_tested_is_refused(options, told, capsys):
    assert redteam.main(options) != 0
    shown = capsys.readouterr()
    assert told in shown.out + shown.err
