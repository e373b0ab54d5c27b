import json

import pytest

from jaxrl_post.envs import make
from jaxrl_post.envs.catalog import named_code
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.gsm8k import GSM8K
from jaxrl_post.envs.tasks.reasoning_gym import ReasoningGym


def test_arithmetic():
    assert make("arithmetic") == Arithmetic()
    assert make("arithmetic?level=2&seed=7") == Arithmetic.at_level(2, seed=7)
    assert make("arithmetic?operations=+-&terms=3") == Arithmetic("+-", terms=3)
    assert make("arithmetic?level=1", options={"eval_size": 5}) == Arithmetic.at_level(
        1, eval_size=5
    )


def test_gsm8k():
    spec = "gsm8k?path=a=b.jsonl&eval_path=test.jsonl&extraction=strict&instruction="
    assert make(spec) == GSM8K(
        "a=b.jsonl", "test.jsonl", extraction="strict", instruction=""
    )
    assert make("gsm8k?eval_path=null", options={"path": "a?b&c"}) == GSM8K("a?b&c")


def test_a_factory_of_ones_own(scripted):
    built = make('scripted_environments:build?size=3&name="4"')
    assert built == scripted.Scripted("4")
    assert make("scripted_environments:Scripted") == scripted.Scripted()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "gsm9k",
            r"no environment 'gsm9k'; there are arithmetic, bfcl, calculate, code",
        ),
        ("", r"no environment ''; there are arithmetic"),
        ("arithmetic?level=9", r"level must be one of \[0, 1, 2, 3, 4, 5\], got 9"),
        ("arithmetic?levl=1", "no option 'levl'; it has operations, terms, digits"),
        ("arithmetic?levl=1", "eval_size.*, level; did you mean 'level'"),
        ("arithmetic?seeds=1", "no option 'seeds'; .*; did you mean 'seed'"),
        ("arithmetic?level=1&digits=2", "no option 'digits'; it has level, seed"),
        ("arithmetic?level", "must be name=value, joined by '&', got 'level'"),
        ("arithmetic?=1", "must be name=value, joined by '&', got '=1'"),
        ("arithmetic?seed=1&seed=2", "option 'seed' is given twice in spec"),
        ("gsm8k", r"'gsm8k' needs the option 'path', as in 'gsm8k\?path=\.\.\.'"),
        ("absent_module:build", "no module 'absent_module' on sys.path. There are"),
        ("jaxrl_post.absent:build", "no module 'jaxrl_post.absent' on sys.path"),
        ("scripted_environments:absent", "has no function or class 'absent'"),
        ("scripted_environments:PROMPT", "has no function or class 'PROMPT'"),
        ("scripted_environments:build_nothing", r"must return an env.*, got NoneType"),
        ("scripted_environments:NoEnvironment", "must return an .*, got NoEnvironment"),
        ("scripted_environments:build", "needs the option 'size'"),
        (
            "scripted_environments:build?sice=1",
            "it has size, name; did you mean 'size'",
        ),
    ],
)
def test_what_cannot_be_made_is_explained(scripted, spec, message):
    with pytest.raises(ValueError, match=message):
        make(spec)


def test_an_option_is_given_once(scripted):
    with pytest.raises(
        ValueError, match=r"'seed' is given twice, in spec .* and in opt"
    ):
        make("arithmetic?seed=1", options={"seed": 1})


def test_the_error_of_a_factory_is_told_with_its_line(scripted):
    told = r"build\(size=0\): AssertionError \(.*scripted_environments.py:\d+\)"
    with pytest.raises(ValueError, match=told):
        make("scripted_environments:build?size=0")


def test_a_dependency_that_is_missing_is_not_a_missing_environment(
    tmp_path, monkeypatch
):
    (tmp_path / "needs_more.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = r"fails: ModuleNotFoundError: No module named 'absent_dependency' \(.*py:1"
    with pytest.raises(ValueError, match=told):
        make("needs_more:build")


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="needs the extra 'envs'")
    spec = "reasoning-gym:chain_sum?max_terms=2&max_digits=1&seed=3&train_size=5"
    environment = make(spec)
    assert environment.name == "reasoning-gym:chain_sum"
    expected = ReasoningGym("chain_sum", {"max_terms": 2, "max_digits": 1}, 3, 5)
    assert environment == expected
    with pytest.raises(
        ValueError, match=r"no task 'chain_sun' .*did you mean chain_sum"
    ):
        make("reasoning-gym:chain_sun")


def test_the_code_that_a_mixture_names_is_that_of_its_parts(tmp_path):
    path = tmp_path / "mixture.json"
    rows = ["jsonl?path=a.jsonl&grader=f1, mine:f,mine:g", "mine:Shop?size=3", "nim"]
    path.write_text(json.dumps([{"env": row} for row in rows]))
    assert named_code(f"mixture?path={path}") == [
        ("reward function", "mine:f"),
        ("reward function", "mine:g"),
        ("environment", "mine:Shop"),
    ]
