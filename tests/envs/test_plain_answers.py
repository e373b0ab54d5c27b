"""A scorer of reasoning-gym never executes a model's text."""

import ast
import time
from pathlib import Path
from typing import Any

import pytest

from jaxrl_post.envs import Message
from jaxrl_post.envs.tasks import reasoning_gym
from jaxrl_post.envs.tasks.plain_answers import harmless
from jaxrl_post.envs.tasks.reasoning_gym import ReasoningGym

DATA = ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"]
FORMULAS = ["countdown", "puzzle24", "polynomial_multiplication"]
INTEGRALS = ["simple_integration", "intermediate_integration"]

COMMAND = "__import__('os').system('touch {file}')"
FORMS = [
    "{command}",
    "[{command}]",
    "[[{command}], ['Q']]",
    "({command}, 1)",
    "{{{command}: 1}}",
    "3 + {command}",
    "2**{command}",
    "x + 0*{command} + C",
    "sin({command})",
    "exp(x, evaluate={command})",
    "Symbol({command})",
    'sympify("{command}")',
    'S("{command}")',
    'parse_expr("{command}")',
    "lambdify(x, 1)({command})",
    'eval("{command}")',
    "(lambda: {command})()",
    "[{command} for y in [1]]",
    'f"{{{command}}}"',
    "1 if {command} else 2",
    "(y := {command})",
    "x.subs(x, {command})",
    "().__class__.__base__.__subclasses__() or {command}",
    '"{command}"',
    "x = {command}",
    "Q\n{command}",
    "{command} = 24",
    "<answer>{command}</answer>",
    "${command}$",
    "1,{command}",
]


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("reasoning_gym", reason="needs the extra 'envs'")


def grade(environment, task, text: str):
    return environment.step(task, (*task.messages, Message("assistant", text)))


def every_task(library):
    for name in library.factory.DATASETS:
        options = {}
        if name == "composite":
            spec = library.composite.DatasetSpec
            options = {"datasets": [spec(each, 1, {}) for each in ("n_queens",)]}
        environment = ReasoningGym(name, options, train_size=3, eval_size=1)
        yield environment, environment.tasks("train")[0]


# A library that reasoning-gym reads puzzles with leaves their file open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_scorer_of_the_library_executes_an_answer(library, tmp_path, monkeypatch):
    # A short name: there are 3,000 answers.
    monkeypatch.chdir(tmp_path)
    file = Path("f")
    command = COMMAND.format(file=file)
    for environment, task in every_task(library):
        for form in FORMS:
            step = grade(environment, task, form.format(command=command))
            assert not file.exists(), (environment.name, form)
            # Others may find what they look for in such text, such as "True".
            if environment.task in DATA + FORMULAS + INTEGRALS:
                assert step.reward < 0.1, (environment.name, form)


@pytest.mark.parametrize("name", DATA + FORMULAS + INTEGRALS)
def test_right_answers_score_as_the_library_has_it(library, name):
    dataset = library.create_dataset(name, seed=0, size=20)
    for index in range(20):
        entry = dataset[index]
        right = entry["answer"]
        assert harmless(right, name, entry) == right
        other = f"({right})"
        # The library could not find this integral, and any that is written so is right.
        unsolved = "Integral" in right
        if name in DATA or unsolved:
            assert harmless(other, name, entry) is None
            assert dataset.score_answer(right, entry) == 1.0
            continue
        # Without the exception for the problem's own text.
        shown = harmless(other, name, entry)
        assert shown is not None
        assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse(other))
        assert dataset.score_answer(shown, entry) == 1.0


@pytest.mark.parametrize(
    ("name", "reward"), list(zip(DATA, [0.1, 0.5, 0.1, 0.1], strict=True))
)
def test_lists_have_their_partial_credit(library, name, reward):
    environment = ReasoningGym(name, train_size=5, eval_size=1)
    task = environment.tasks("train")[0]
    right = task.reference
    rows: Any = [row.split() for row in right.split("\n")]
    if name == "string_insertion":
        rows = list(right)
    elif name == "spiral_matrix":
        rows = right.split()
    assert grade(environment, task, repr(rows)).reward == reward


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("binary_matrix", "[r.split() for r in entry['answer'].split(chr(10))]"),
        ("n_queens", "[r.split() for r in valid_solutions[0].split(chr(10))]"),
        ("spiral_matrix", "entry['answer'].split()"),
        ("string_insertion", "oracle_answer"),
    ],
)
def test_an_answer_does_not_see_the_names_of_its_scorer(library, name, answer):
    environment = ReasoningGym(name, train_size=5, eval_size=1)
    assert grade(environment, environment.tasks("train")[0], answer).reward == 0.0


FOUR = {"answer": "4*(5 + 1)*1*1", "metadata": {}}
INTEGRAL = {"answer": "x*exp(x) + C", "metadata": {"variable": "x"}}
PRODUCT = {
    "answer": "2*y**40 + x",
    "metadata": {"polynomial_expr": "x + 2*y**20*y**20"},
}


@pytest.mark.parametrize(
    ("name", "entry", "answer", "shown"),
    [
        ("countdown", FOUR, "(-5+1)/4 - +2.5", "(-5 + 1) / 4 - +2.5"),
        ("countdown", FOUR, "2**(3/2)", "2 ** (3 / 2)"),
        ("countdown", FOUR, "4*6 # 1 1", "4 * 6"),
        ("polynomial_multiplication", PRODUCT, "y**40*2+x", "y ** 40 * 2 + x"),
        ("intermediate_integration", INTEGRAL, "x*E**x+C", "x * E ** x + C"),
        ("intermediate_integration", INTEGRAL, "log(Abs(x))+pi", "log(Abs(x)) + pi"),
        ("n_queens", FOUR, "[['Q', '_']]", "[['Q', '_']]"),
        ("spiral_matrix", FOUR, "1, -2", "(1, -2)"),
        ("coin_flip", FOUR, "1e-3", "1e-3"),
        ("chain_sum", FOUR, "__import__('os')", "__import__('os')"),
    ],
)
def test_what_is_shown_to_a_scorer(name, entry, answer, shown):
    assert harmless(answer, name, entry) == shown


@pytest.mark.parametrize(
    ("name", "entry", "answer"),
    [
        ("countdown", FOUR, ""),
        ("countdown", FOUR, "24!"),
        ("countdown", FOUR, "x"),
        ("countdown", FOUR, "S"),
        ("countdown", FOUR, "sqrt(4)"),
        ("countdown", FOUR, "1 or 2"),
        ("countdown", FOUR, "4 << 1000000000"),
        ("countdown", FOUR, "9**9**9**9"),
        ("countdown", FOUR, "((9**9)**9)**9"),
        ("countdown", FOUR, "9**(9/1000)"),
        ("countdown", FOUR, "9**(9**9)"),
        ("countdown", FOUR, "9**1e300"),
        ("countdown", FOUR, "1e999"),
        ("countdown", FOUR, "9" * 31),
        ("countdown", FOUR, "9" * 5000),
        ("countdown", FOUR, "+".join(["1"] * 600)),
        ("countdown", FOUR, "(" * 900),
        ("countdown", FOUR, "-" * 900 + "(" * 90),
        ("countdown", FOUR, "'24'"),
        ("countdown", FOUR, "True"),
        ("countdown", FOUR, "[24]"),
        ("countdown", FOUR, "24\0"),
        ("polynomial_multiplication", PRODUCT, "z"),
        ("polynomial_multiplication", PRODUCT, "x(2)"),
        ("polynomial_multiplication", PRODUCT, "x**y"),
        ("polynomial_multiplication", PRODUCT, "y**81"),
        ("intermediate_integration", INTEGRAL, "exp(exp(x))"),
        ("intermediate_integration", INTEGRAL, "sin(E**x)"),
        ("intermediate_integration", INTEGRAL, "sin(cos(sin(x)))"),
        ("intermediate_integration", INTEGRAL, "Integral(x*exp(x), x)"),
        ("intermediate_integration", INTEGRAL, "sin(x, evaluate=False)"),
        ("intermediate_integration", INTEGRAL, "sin(*x)"),
        ("intermediate_integration", INTEGRAL, "factorial(x)"),
        ("coin_flip", FOUR, "1e999999999"),
        ("coin_flip", FOUR, "1/3E-9999"),
        ("n_queens", FOUR, "[b'Q']"),
        ("n_queens", FOUR, "['Q'] * 1000000000"),
        ("n_queens", FOUR, "f'{1}'"),
        ("n_queens", FOUR, "[board]"),
        ("n_queens", FOUR, "[*'Q']"),
    ],
)
def test_what_is_refused(name, entry, answer):
    assert harmless(answer, name, entry) is None


def test_nonsense_scores_as_it_did(library):
    for name, reward in (("countdown", 0.01), ("puzzle24", 0.01), ("n_queens", 0.0)):
        environment = ReasoningGym(name, train_size=5, eval_size=1)
        task = environment.tasks("train")[0]
        dataset = library.create_dataset(name, seed=0, size=5)
        nonsense = dataset.score_answer("no formula", task.data["entry"])
        for text in ("no formula", "9**9**9**9", "().__class__"):
            assert grade(environment, task, text).reward == reward == nonsense


def test_a_scorer_that_takes_too_long_is_interrupted(library, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "_SCORING_S", 0.2)
    environment = ReasoningGym("intermediate_integration", train_size=5, eval_size=1)
    task = environment.tasks("train")[0]
    x = task.data["entry"]["metadata"]["variable"]
    began = time.process_time()
    hard = "*".join(f"tan({n}*{x})" for n in range(1, 20))
    with pytest.raises(TimeoutError, match=r"^the scorer of intermediate_integration "):
        grade(environment, task, hard)
    # It runs for minutes otherwise.
    assert time.process_time() - began < 5
