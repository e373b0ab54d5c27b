"""Functions from outside of the package: how they are found, called and refused."""

import functools
from typing import Literal, TypedDict, Unpack

import pytest

from jaxrl_post.specs import call, check_plain, fits, imported, modules_of, raised


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes modules that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_package", r"ModuleNotFoundError: No module .*\.py:1\)"),
        ("from json import nothing", r"ImportError: cannot import name.*\.py:1\)"),
        ("x = 1\ndef f(:\n", r"SyntaxError: invalid syntax \(.*broken_\d+\.py:2\)"),
        ("\n1 / 0", r"ZeroDivisionError: division by zero \(.*\.py:2\)"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(.*\.py:2\)"),
        ("import json.nothing", r"No module named 'json.nothing'.*\.py:1\)"),
    ],
)
def test_a_module_that_fails_is_told_with_its_line(write, text, told):
    name = f"broken_{abs(hash(text))}"
    write(name, text)
    with pytest.raises(ValueError, match=f"no grader '{name}:f': the import.*{told}"):
        imported(f"{name}:f", "grader")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent_one:f", "there is no module 'absent_one' on sys.path. There are a, b"),
        ("json.absent:f", "there is no module 'json.absent' on sys.path"),
        ("mine.py:f", "a file is named as a module, 'mine:f', in the directory of"),
        ("./place/mine.py:f", "a file is named as a module, 'mine:f'"),
        ("json:dump_", "'json' has no function or class 'dump_'; did you mean 'dump"),
        ("math:pi", "no function or class 'pi', which is a value of type float"),
        ("json", "no grader 'json'; there are a, b"),
        ("json:", "'json' has no function or class ''"),
    ],
)
def test_a_name_that_nothing_has_is_explained(name, told):
    with pytest.raises(ValueError, match=told):
        imported(name, "grader", "a, b")


async def later(): ...


async def later_each():
    yield 1


def each():
    yield 1


class Later:
    async def __call__(self): ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (later, "async function.*write a plain one, which may call asyncio.run"),
        (later_each, "async function"),
        (each, "generator, which yields; write a function that returns"),
        (functools.partial(later), "async function"),
        (Later(), "async function"),
    ],
)
def test_a_function_whose_body_would_not_run_is_refused(function, told):
    with pytest.raises(ValueError, match=f"^it is an? {told}"):
        check_plain(function, "it")
    for plain in (len, Later, functools.partial(len), lambda: 1, 3, None):
        check_plain(plain, "it")


class Shared(TypedDict, total=False):
    weight: float


def typed(
    *,
    level: int = 1,
    scale: float | None = None,
    text: str = "",
    flag: bool = False,
    kind: Literal["a", "b"] = "a",
    sizes: tuple[int, ...] = (),
) -> tuple[object, ...]:
    return level, scale, text, flag, kind, sizes


def inferred(level=1, share=0.5, flag=False, text="a"):
    return level, share, flag, text


def shared(*, own: int = 1, **rest: Unpack[Shared]):
    return own, rest


def passing(*, own: int = 1, **rest):
    return typed(**rest)


def negative(*, level: int = 1):
    if level < 0:
        raise ValueError(f"level must be >= 0, got {level}")


def unnamed(x, /): ...


@pytest.mark.parametrize(
    ("build", "chosen", "told"),
    [
        (typed, {"level": "x"}, "it 'm:f': level must be an integer, got 'x'"),
        (typed, {"level": 1.5}, "level must be an integer, got 1.5"),
        (typed, {"level": True}, "level must be an integer, got True"),
        (typed, {"scale": "2"}, r"scale must be of type float \| None, got '2'"),
        (typed, {"scale": float("nan")}, "scale must be of type float.*, got nan"),
        (typed, {"text": 3}, 'text must be of type str, got 3.*write text="3"'),
        (typed, {"flag": "yes"}, "flag must be true or false, got 'yes'"),
        (typed, {"kind": "c"}, "kind must be 'a' or 'b', got 'c'"),
        (typed, {"sizes": [1, "x"]}, r"sizes must be of type tuple\[int, ...\], got"),
        (inferred, {"level": "x"}, "level must be a number, got 'x'"),
        (inferred, {"flag": 1}, "flag must be true or false, got 1"),
        (shared, {"won": 2}, "no option 'won'; it has own, weight; did you mean 'own'"),
        (shared, {"weight": "x"}, "weight must be a number, got 'x'"),
        (
            passing,
            {"levl": 2},
            "no option 'levl'; it has own. It raises TypeError.*lev",
        ),
        (
            negative,
            {"level": -1},
            r"m:f\(level=-1\): ValueError: level must be >= 0.*py",
        ),
        (unnamed, {}, "the parameter 'x' takes no name.*write it without '/'"),
        (lambda need: need, {}, r"needs the option 'need', as in 'm:f\?need=...'"),
        (iter, {}, "its parameters are unknown|takes no name"),
    ],
)
def test_options_that_do_not_fit_are_explained(build, chosen, told):
    with pytest.raises(ValueError, match=told):
        call(build, chosen, "m:f", kind="it")


def test_options_that_fit_are_passed_on():
    chosen = {"level": 2, "scale": 1, "text": "x", "flag": True, "sizes": [1, 2]}
    assert call(typed, chosen, "m:f") == (2, 1, "x", True, "a", [1, 2])
    assert call(inferred, {"level": 0.5, "share": 1}, "m:f") == (0.5, 1, False, "a")
    assert call(shared, {"own": 2, "weight": 0.5}, "m:f") == (2, {"weight": 0.5})
    assert call(passing, {"level": 3}, "m:f")[0] == 3
    assert fits("x", "an annotation that does not evaluate")


def test_an_error_of_the_package_is_its_own():
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 / 0, {}, "built_in")


def test_an_error_without_a_text_has_its_type_and_line():
    def fails():
        raise AssertionError

    with pytest.raises(AssertionError) as found:
        fails()
    assert raised(found.value).startswith("AssertionError (")
    assert "test_specs.py:" in raised(found.value)


HELPERS = """
def grade(response, scale=1):
    return scale

class Scorer:
    def __call__(self, response):
        return 1
"""
NAMES = """
import functools
import operator
from helpers_of_{0} import Scorer, grade
from jaxrl_post.envs.tasks.arithmetic import Arithmetic

half = functools.partial(functools.lru_cache(grade), scale=0.5)
scorer = Scorer()
own = lambda response: 1
several = [grade, own]
total = sum
"""


@pytest.mark.parametrize(
    ("name", "helped"),
    [
        ("grade", True), ("half", True), ("scorer", True), ("Scorer", True),
        ("own", False), ("several", False), ("total", False), ("Arithmetic", False),
    ],
)  # fmt: skip
def test_the_modules_of_a_name_are_where_it_stands_and_where_it_is_made(
    write, tmp_path, name, helped
):
    module, helper = f"names_of_{name}", f"helpers_of_{name}"
    write(module, NAMES.format(name))
    write(helper, HELPERS)
    expected = [module, helper] if helped else [module]
    assert modules_of(f"{module}:{name}") == {
        each: tmp_path / f"{each}.py" for each in expected
    }
