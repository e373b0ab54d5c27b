"""Tasks from prompt/answer files, and how they are graded."""

import json
import math
import pickle
import sys

import numpy as np
import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs import Message, WorkerPool, make
from jaxrl_post.envs.real_number import NumberError
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.envs.tasks.graders import Grader
from jaxrl_post.envs.tasks.mixture import Part, mixture
from jaxrl_post.envs.tasks.prompt_answers import PromptAnswers
from jaxrl_post.envs.tools import Interpreter, ToolEnvironment
from jaxrl_post.examples.environment import check_functions

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(60)]


@pytest.fixture
def file(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        if path.suffix == ".parquet":
            arrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def one(rows, file, **options):
    environment = PromptAnswers(file(rows), file(rows, "eval.jsonl"), **options)
    return environment, environment.tasks("train")[0]


def reward(environment, task, text):
    step = environment.step(task, (*task.messages, Message("assistant", text)))
    assert step.done
    return step.reward


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_share_of_the_prompts_is_held_out_by_their_text(file, name):
    path = file(ROWS, name)
    environment = make("jsonl", options={"path": path})
    texts = {
        split: [task.messages[0].content for task in environment.tasks(split)]
        for split in ("train", "eval")
    }
    assert sorted(texts["train"] + texts["eval"]) == sorted(r["prompt"] for r in ROWS)
    assert 0 < len(texts["eval"]) < 20
    again = PromptAnswers(file(ROWS[::-1], "other.jsonl")).tasks("eval")
    assert {task.messages[0].content for task in again} == set(texts["eval"])


def test_a_file_of_its_own_is_held_out_whole(file):
    environment = PromptAnswers(file(ROWS), file(ROWS[:3], "eval.jsonl"))
    assert len(environment.tasks("train")) == 60
    assert len(environment.tasks("eval")) == 3


def test_fields_are_those_of_ones_choice(file):
    rows = [{"question": "2+2?", "gold": 4, "worked": "2+2 is 4."}]
    path = file(rows)
    environment = make(
        "jsonl?prompt=question&answer=gold&solution=worked&instruction=Be brief.",
        options={"path": path, "eval_path": path, "system": "You add."},
    )
    (task,) = environment.tasks("train")
    assert task.messages == (
        Message("system", "You add."),
        Message("user", "2+2?\n\nBe brief."),
    )
    assert task.reference == "4"
    assert environment.demonstration(task) == "2+2 is 4."
    assert reward(environment, task, " 4 ") == 1.0


def test_messages_are_a_prompt(file):
    turns = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+1="},
    ]
    _, task = one([{"messages": turns, "answer": "3"}], file)
    assert [message.role for message in task.messages] == ["user", "assistant", "user"]


# (grader, answer in the file, response, reward)
GRADED = [
    (Grader("exact"), "Paris", " Paris\n", 1),
    (Grader("exact"), "Paris", "paris", 0),
    (Grader("exact"), "Paris", "Paris, I think", 0),
    (Grader("exact"), 7, "7", 1),
    (Grader("exact", extract=r"\((.)\)"), "B", "(A) no, (B)", 1),
    (Grader("exact", extract=r"\((.)\)"), "A", "(A) no, (B)", 0),
    (Grader("exact", extract=r"\((.)\)"), "B", "B", 0),
    (Grader("exact", extract="[AB]"), "B", "A or B", 1),
    (Grader("exact", extract="(A)|B"), "A", "A or B", 0),
    (Grader("regex"), r"\d+ apples", "12 apples", 1),
    (Grader("regex"), r"\d+ apples", "12 apples, or 13", 0),
    (Grader("regex"), ".*7.*", "first\n7\nlast", 1),
    (Grader("regex"), "yes|yeah", "yes yes", 0),
    # Two of three words said are right, and both that are asked: 2*2 / (3 + 2).
    (Grader("f1"), "Eiffel Tower", "The Eiffel tower, Paris.", 0.8),
    (Grader("f1"), ["Tour Eiffel", "the Eiffel Tower"], "Eiffel Tower!", 1),
    (Grader("f1"), ["Tour Eiffel", "1889"], "1890", 0),
    # A word counts as often as both have it: 2*1 / (3 + 1).
    (Grader("f1"), "Paris", "Paris Paris Paris", 0.5),
    (Grader("f1"), "Paris", "the", 0),
    (Grader("f1"), 1889, "In 1889", pytest.approx(2 / 3)),
    (Grader("f1", extract="<a>(.*?)</a>"), "Paris", "Oh <a> paris </a>", 1),
    (Grader("f1", extract="<a>(.*?)</a>"), "Paris", "Paris", 0),
]


@pytest.mark.parametrize(("grader", "answer", "text", "expected"), GRADED)
def test_grading(grader, answer, text, expected):
    assert grader.grade(text, answer).reward == expected


@pytest.mark.parametrize(
    ("grader", "answer", "text", "expected"),
    [
        (Grader("math"), "72", "so #### 72", 1),
        (Grader("math"), 72, r"\boxed{72.0}", 1),
        (Grader("math"), "48+24\n#### 72", "#### 72", 1),
        (Grader("math"), r"$\frac{1}{2}$", r"\boxed{0.5}", 1),
        (Grader("math"), r"\frac{1}{2}", "#### 1/2", 1),
        (Grader("math"), "72", "72 72 72 72", 0),
        (Grader("math"), "72", "It is 72.", 0),
        (Grader("math", extraction="flexible"), "72", "It is 72.", 1),
        (Grader("math", extract=r"A: (\S+)"), "72", "A: 72.0", 1),
        (Grader("math", extract=r"A: (\S+)"), "72", "#### 72", 0),
    ],
)
def test_grading_of_mathematics(grader, answer, text, expected):
    pytest.importorskip("math_verify", reason="needs the extra 'math'")
    assert grader.grade(text, answer).reward == expected


def test_f1_tells_exact_matches_apart():
    for said, reward, exact in (("A red fox.", 1, 1), ("fox red", 1, 0)):
        grade = Grader("f1").grade(said, "red fox")
        assert (grade.reward, grade.metrics["correct"]) == (reward, exact)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "friends": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


# (grader, schema, response, reward, whether there was JSON)
VALID = [
    (Grader("schema"), PERSON, '{"name": "Ada"}', 1, 1),
    (Grader("schema"), json.dumps(PERSON), '{"name": "Ada"}', 1, 1),
    (Grader("schema"), PERSON, '{"name": 1}', 0, 1),
    (Grader("schema"), PERSON, '{"name": "A", "friends": [{"name": 1}]}', 0, 1),
    (Grader("schema"), PERSON, 'So: {"name": "Ada"}', 0, 0),
    (Grader("schema"), PERSON, 'So:\n```json\n{"name": "Ada"}\n```\nDone.', 1, 1),
    (Grader("schema"), PERSON, '```\n{"name": "Ada"}\n```\n```\n{}\n```', 0, 1),
    (Grader("schema", extract="<(.*)>"), PERSON, '<{"name": "Ada"}>', 1, 1),
    (Grader("schema", extract="<(.*)>"), PERSON, '{"name": "Ada"}', 0, 0),
    (Grader("schema"), True, "", 0, 0),
    (Grader("schema"), {"type": "number"}, "NaN", 0, 0),
    (Grader("schema"), {"type": "number"}, "1e999", 0, 0),
    (Grader("schema"), {"multipleOf": 0.5}, "1" * 400, 0, 1),
    (Grader("schema"), {"type": "array"}, "[" * 100_000, 0, 0),
    (Grader("schema"), {"items": {"$ref": "#"}}, "[" * 900 + "]" * 900, 0, 1),
]


@pytest.mark.parametrize(("grader", "schema", "text", "expected", "answered"), VALID)
def test_json_under_a_schema(grader, schema, text, expected, answered):
    pytest.importorskip("jsonschema", reason="needs the extra 'schema'")
    assert grader.wrong_with(schema) is None
    grade = grader.grade(text, schema)
    assert (grade.reward, grade.metrics["answered"]) == (expected, answered)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "sting"}, "is no valid JSON schema: 'sting' is not .* at 'type'"),
        ({"pattern": "("}, "is no valid JSON schema: .* at 'pattern'"),
        ("{", "is no JSON: Expecting property name"),
        (3, "must be a JSON schema, an object or a bool, got int"),
        ({"$schema": "draft-99"}, "names an unknown draft, 'draft-99'"),
        ({"$schema": 3}, "names an unknown draft, 3"),
        ({"$ref": "#"}, "refers to itself without end"),
        (
            {"properties": {"a": {"$ref": "http://127.0.0.1:9/person"}}},
            "refers to 'http://127.0.0.1:9/person', which is not inside of it",
        ),
        ({"items": {"$ref": "file:///etc/hosts"}}, "refers to 'file:///etc/hosts'"),
        ({"items": {"$ref": "#/$defs/absent"}}, "refers to '/.defs/absent', which"),
    ],
)
def test_a_schema_that_cannot_be_used_is_a_bad_row(file, schema, reason):
    pytest.importorskip("jsonschema", reason="needs the extra 'schema'")
    path = file([{"prompt": "1", "answer": PERSON}, {"prompt": "2", "answer": schema}])
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: field 'answer' {reason}"):
        PromptAnswers(path, path, grader="schema").tasks("train")


def test_a_missing_library_names_its_extra(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    environment = PromptAnswers(file(ROWS), grader="schema")
    for needs in (environment.prepare, lambda: environment.tasks("train")):
        with pytest.raises(ModuleNotFoundError, match=r"pip install -e .*\[schema\]"):
            needs()


@pytest.mark.processes
def test_a_function_grades_in_a_worker(file, scripted):
    rows = [{"prompt": "Say something long.", "answer": {"length": 4}}]
    environment, task = one(rows, file, grader="scripted_environments:length_share")
    assert pickle.loads(pickle.dumps(environment)) == environment
    assert reward(environment, task, "abc") == 0.75
    turn = (*task.messages, Message("assistant", "abcd"))
    with WorkerPool(environment) as pool:
        outcome = pool.submit(task, turn).result(timeout=60)
    assert outcome.step.reward == 1.0
    assert environment.demonstration(task) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_a_function_returns_a_finite_number(monkeypatch, value):
    # A name of its own, as functions are kept by name.
    name = f"echo_{value}"
    monkeypatch.setattr(json, name, lambda response, answer: value, raising=False)
    said = rf"what grader 'json:{name}' returns must be a finite number, got {value!r}"
    with pytest.raises(NumberError, match=said):
        Grader(f"json:{name}").grade("", "")


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float16(1), np.int64(1), np.bool_(True), np.array(1)]
)
def test_a_function_may_return_any_real_number(monkeypatch, value):
    name = f"one_{type(value).__name__}"
    monkeypatch.setattr(json, name, lambda response, answer: value, raising=False)
    reward = Grader(f"json:{name}").grade("", "").reward
    assert (reward, type(reward)) == (1.0, float)


@pytest.mark.processes
def test_a_function_without_a_number_is_refused_before_a_run_begins(file, scripted):
    path = file(ROWS)

    def environment(name, **options):
        options = {"path": path, "eval_path": path, **options}
        return make(f"jsonl?grader=scripted_environments:{name}", options=options)

    none = environment("graded_none")
    part = Part(none, 1.0, "words")
    for each in (
        none,
        environment("graded_right_or_none"),
        mixture([Part(PromptAnswers(path, path), 1.0, "sums"), part]),
        ToolEnvironment(none, (Interpreter(),)),
        Rubric(PromptAnswers(path, path), {"none": Criterion(scripted.scored_none)}),
    ):
        with pytest.raises(
            ConfigError, match=r"--env: .*'(none|.*:graded_\w*none)' .*None"
        ):
            check_functions(each, 60.0)
    # These have no function, or a good one.
    check_functions(PromptAnswers("absent.jsonl"), 60.0)
    check_functions(environment("graded_share"), 60.0)


@pytest.mark.processes
def test_a_rubric_that_raises_on_a_known_answer_is_warned_of(file, scripted, caplog):
    path = file(ROWS)
    inner = PromptAnswers(path, path)
    check_functions(Rubric(inner, {"words": Criterion(scripted.scored_raising)}), 60.0)
    assert "to train task 0, '0+1=', could not be judged (raised)" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grader": "exactly"}, "no grader 'exactly'; there are exact, f1, math, re"),
        ({"grader": "absent_module:f"}, "there is no module 'absent_module' on sys.p"),
        ({"grader": "json:absent"}, "'json' has no function or class 'absent'"),
        ({"extract": "("}, r"extract must be a regular expression, got '\('"),
        ({"extract": "a", "grader": "operator:eq"}, "gets the whole response"),
        ({"extraction": "flexible"}, "extraction is for the grader 'math' alone"),
        ({"extraction": "loose"}, "must be 'flexible' or 'strict', got 'loose'"),
        ({"on_bad_row": "no"}, "on_bad_row must be 'fail' or 'skip', got 'no'"),
        ({"prompt": 1}, "prompt must be a text, got 1"),
        ({"answer": None}, "answer must be a text, got None"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        PromptAnswers("rows.jsonl", **options)


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"question": "1", "answer": "2"}, {}, r"no field 'prompt' \(fields: 'qu"),
        ({"prompt": "1"}, {}, r"no field 'answer' .*name the fields, as in --env"),
        ({"prompt": 1, "answer": "2"}, {}, "field 'prompt' must be str or list of mes"),
        ({"prompt": " ", "answer": "2"}, {}, "the prompt is empty"),
        ({"prompt": "1", "answer": " "}, {}, "field 'answer' is empty"),
        ({"prompt": "1", "answer": [2]}, {}, "field 'answer' must be a text or a num"),
        ({"prompt": "1", "answer": []}, {"grader": "f1"}, "'answer' is an empty list"),
        ({"prompt": "1", "answer": ["b", {}]}, {"grader": "f1"}, "a number, got dict"),
        ({"prompt": "1", "answer": "A."}, {"grader": "f1"}, "has no word but articles"),
        ({"prompt": "1", "answer": "("}, {"grader": "regex"}, "must be a regular expr"),
        ({"prompt": "1", "answer": "2", "s": 3}, {"solution": "s"}, "'s' must be str"),
        (
            {"messages": [{"role": "system", "content": "a"},
                          {"role": "user", "content": "b"}], "answer": "2"},
            {"system": "c"},
            "has a system message of its own",
        ),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_its_line(file, row, options, reason):
    path = file([{**good, "s": "so"} for good in ROWS] + [row])
    with pytest.raises(ValueError, match=rf"rows\.jsonl:61: .*{reason}"):
        PromptAnswers(path, **options).tasks("train")


def test_bad_rows_are_skipped_and_counted(file, caplog):
    path = file([*ROWS, {"prompt": "1"}])
    found = PromptAnswers(path, path, on_bad_row="skip").tasks("train")
    assert len(found) == 60
    assert "60 rows read, 1 skipped" in caplog.text
    assert "rows.jsonl:61: no field 'answer'" in caplog.text


def test_a_split_without_a_prompt_is_refused(file):
    environment = PromptAnswers(file(ROWS[:1]))
    with pytest.raises(
        ValueError, match=r"no prompt falls into 'eval' in so .*--data.eval"
    ):
        environment.tasks("eval")


def test_right_answers_are_demonstrations_where_the_grader_says_so(file):
    for grader, expected in (
        ("exact", "1"),
        ("f1", "1"),
        ("math", "#### 1"),
        ("regex", None),
    ):
        environment, task = one(ROWS, file, grader=grader)
        assert environment.demonstration(task) == expected
