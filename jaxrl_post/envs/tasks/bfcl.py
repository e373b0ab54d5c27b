"""BFCL's conversations of several turns with tools that keep state; held out.

References:
    Patil et al., "The Berkeley Function Calling Leaderboard (BFCL): From Tool Use to
    Agentic Evaluation of Large Language Models", ICML 2025.
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from jaxrl_post.envs.env import Answer, Message, Split, Step, Task, ToolCall
from jaxrl_post.envs.tools import Tool
from jaxrl_post.envs.tools.environment import ToolSession

__all__ = ["Bfcl", "Category", "gold_calls"]

type Category = Literal[
    "multi_turn_base",
    "multi_turn_miss_param",
    "multi_turn_miss_func",
    "multi_turn_long_context",
]

_CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"
_BACKENDS = "bfcl_eval.constants.executable_backend_config"
_PROMPTS = "bfcl_eval.constants.default_prompts"
# Answers with calls after which the benchmark gives a model up, in a turn of the user.
_MOST_STEPS = 20
# Calls of an answer: more than the longest right sequence of a turn, which has 34.
_MOST_CALLS = 64
# Types of the package's schemas that JSON Schema calls otherwise.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True)
class Bfcl:
    """Conversations in which a user asks for several things, one after the other.

    An episode has up to seven turns of the user. The policy calls functions of up to
    two APIs (a file system, a car, a broker, ...), which keep state; its first answer
    without a call ends the turn. As in the benchmark, a turn is right if after it the
    APIs have the state that the right calls lead to, and the results so far include the
    right calls' results. The reward is 1 if all turns are right, and 0 otherwise. An
    episode ends at the first wrong turn, as it cannot be right any more, and after more
    than 20 answers with calls in a turn.

    The package bfcl-eval has the data, the APIs and the checks. It asks for much more
    than these need, so install it without its dependencies:
    `pip install --no-deps bfcl-eval` and `pip install mpmath`.

    Args:
        category: "multi_turn_base"; "multi_turn_miss_param", where the user first
            forgets to say something; "multi_turn_miss_func", where functions are
            missing at first, and are described in a later turn of the user;
            "multi_turn_long_context", with long results.

    Raises:
        ModuleNotFoundError: bfcl-eval is not installed.
        ValueError: there is no such category.

    >>> Bfcl("multi_turn")
    Traceback (most recent call last):
    ValueError: category must be one of multi_turn_base, multi_turn_miss_param,
    multi_turn_miss_func, multi_turn_long_context, got 'multi_turn'
    """

    category: Category = "multi_turn_base"

    def __post_init__(self) -> None:
        known = get_args(Category.__value__)
        if self.category not in known:
            raise ValueError(
                f"category must be one of {', '.join(known)}, got {self.category!r}"
            )
        _folder()

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"bfcl({self.category})"

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The conversations, in the benchmark's order.

        Args:
            split: "eval".

        Raises:
            ValueError: `split` is "train": these are held out.
        """
        if split != "eval":
            raise ValueError(
                "bfcl is a benchmark and has nothing to train on, not even the "
                "tokenizer of a preset: give `python -m launch.evaluate --env bfcl` a "
                "--model that is a directory or a name on the hub"
            )
        return _tasks(self.category)

    def prepare(self) -> None:
        """Imports the checks, and the APIs of all tasks.

        Raises:
            ModuleNotFoundError: bfcl-eval, or mpmath, is not installed.
        """
        importlib.import_module(_CHECKER)
        for name in {name for task in _tasks(self.category) for name in _apis(task)}:
            _api(name)

    def demonstration(self, task: Task) -> None:
        """None: the right calls are not for training."""
        del task

    def open(self, task: Task) -> BfclSession:
        """Starts an episode, with APIs of its own."""
        return BfclSession(task)


class BfclSession:
    """One episode; from `Bfcl.open`."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._checker: Any = importlib.import_module(_CHECKER)
        self._models = _opened(task)
        self._golds = _opened(task)
        self._results: list[str] = []
        self._turn = 0
        self._steps = 0
        row = task.data["row"]
        names = [tool.name for tool in _offered(row["involved_classes"])]
        self._hidden = {name for missing in _missing(row).values() for name in missing}
        self._tools = ToolSession(
            task,
            dict.fromkeys(names, self),
            self._ended_turn,
            ExitStack(),
            # As in the benchmark, a function that is missing can be called all the
            # same. A policy knows such a name only by chance.
            hidden=self._hidden,
            max_calls=_MOST_CALLS,
        )

    def step(self, turn: Answer) -> Step:
        """Carries calls out, or ends the user's turn."""
        return self._taken(turn, self._tools.step)

    def repeat(self, turn: Answer, said: tuple[Message, ...]) -> Step:
        """Takes a turn again; a call that came too late is not carried out."""
        return self._taken(turn, lambda again: self._tools.repeat(again, said))

    def _taken(self, turn: Answer, take: Callable[[Answer], Step]) -> Step:
        self._steps += bool(turn.tool_calls)
        if self._steps > _MOST_STEPS:
            return Step(0.0, done=True, metrics=self._metrics())
        return take(turn)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a function of an API."""
        result = _called(self._models, name, (), arguments)
        self._results.append(result)
        return result

    def close(self) -> None:
        """Does nothing: all state is in memory."""

    def _ended_turn(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Checks a turn of the user; the next one follows if it was right."""
        del conversation
        right = self._right(_gold(task)[self._turn])
        self._turn += right
        self._steps = 0
        row = task.data["row"]
        if not right or self._turn == len(row["question"]):
            return Step(float(right), done=True, metrics=self._metrics())
        self._hidden.difference_update(_missing(row).get(self._turn, ()))
        return Step(0.0, False, _turn(row, self._turn), self._metrics())

    def _right(self, gold: Sequence[_Call]) -> bool:
        expected = [_called(self._golds, *call) for call in gold]
        if not gold:
            # The user asks for what cannot be done yet: the benchmark checks nothing.
            return True
        if not self._steps:
            return False
        state = self._checker.state_checker(self._models, self._golds)
        results = self._checker.response_checker(self._results, expected, self._turn)
        return bool(state["valid"] and results["valid"])

    def _metrics(self) -> dict[str, float]:
        return {"bfcl/right_turns": float(self._turn)}


def gold_calls(task: Task) -> list[tuple[ToolCall, ...]]:
    """The right calls of a task, one tuple per turn of the user.

    Args:
        task: of `Bfcl`.

    Returns:
        Calls with arguments by name; a turn that asks for nothing possible has none.
    """
    found = []
    for number, turn in enumerate(_gold(task)):
        calls = []
        for place, (name, values, named) in enumerate(turn):
            owner = next(each for each in map(_api, _apis(task)) if hasattr(each, name))
            signature = inspect.signature(getattr(owner, name))
            # None stands for the instance.
            arguments = dict(signature.bind(None, *values, **named).arguments)
            arguments.pop("self", None)
            calls.append(ToolCall(name, json.dumps(arguments), f"{number}_{place}"))
        found.append(tuple(calls))
    return found


# The name of a function, arguments by place, and arguments by name.
type _Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _gold(task: Task) -> list[list[_Call]]:
    return [[_parsed(call) for call in turn] for turn in task.data["gold"]]


def _parsed(text: str) -> _Call:
    """A call that the package writes as Python; it is read, and not executed."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"bfcl-eval: a right call must be of a name, got {text!r}")
    values = tuple(map(ast.literal_eval, call.args))
    named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return call.func.id, values, named


def _called(
    apis: Mapping[str, Any], name: str, values: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Calls a function and writes its result as the benchmark does."""
    # If two APIs have a function of this name, the benchmark takes the last one's.
    owner = [api for api in apis.values() if hasattr(api, name)][-1]
    try:
        result = getattr(owner, name)(*values, **named)
    # The APIs are foreign code, and the arguments are a model's.
    except Exception as error:
        return f"Error during execution: {error}"
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _opened(task: Task) -> dict[str, Any]:
    """New APIs, in the state in which a task begins, by name."""
    row = task.data["row"]
    stateless = importlib.import_module(_BACKENDS).STATELESS_CLASSES
    found = {}
    for name in _apis(task):
        api = found[name] = _api(name)()
        if name not in stateless:
            beginning = copy.deepcopy(row["initial_config"].get(name, {}))
            api._load_scenario(beginning, long_context="long_context" in row["id"])
    return found


def _apis(task: Task) -> list[str]:
    return task.data["row"]["involved_classes"]


@lru_cache(maxsize=32)
def _api(name: str) -> Any:
    """A class of the package."""
    paths = importlib.import_module(_BACKENDS).CLASS_FILE_PATH_MAPPING
    return getattr(importlib.import_module(paths[name]), name)


@lru_cache(maxsize=8)
def _tasks(category: Category) -> tuple[Task, ...]:
    data = _folder() / "data"
    file = f"BFCL_v4_{category}.json"
    golds = {
        row["id"]: row["ground_truth"] for row in _rows(data / "possible_answer" / file)
    }
    return tuple(
        Task(
            index,
            _turn(row, 0),
            "",
            {"row": row, "gold": golds[row["id"]]},
            tuple(tool.to_json() for tool in _at_first(row)),
        )
        for index, row in enumerate(_rows(data / file))
    )


def _turn(row: Mapping[str, Any], number: int) -> tuple[Message, ...]:
    """The user's messages of a turn.

    Functions that were missing until then are described, one a line, as the benchmark
    does for models that have no tools in their template: those in the prompt cannot be
    changed any more.
    """
    said = [each["content"] for each in row["question"][number]]
    added = _missing(row).get(number, ())
    if added:
        described = [
            json.dumps(tool.to_json())
            for tool in _offered(row["involved_classes"])
            if tool.name in added
        ]
        prompts = importlib.import_module(_PROMPTS)
        asked = prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
        said.append("\n".join([*described, asked]))
    return tuple(Message("user", each) for each in said)


def _missing(row: Mapping[str, Any]) -> dict[int, list[str]]:
    """Names of the functions that are missing until a turn, by its number."""
    missing = row.get("missed_function", {})
    return {int(turn): names for turn, names in missing.items()}


def _at_first(row: Mapping[str, Any]) -> list[Tool]:
    """The functions that the prompt offers."""
    later = {name for names in _missing(row).values() for name in names}
    offered = _offered(row["involved_classes"])
    return [tool for tool in offered if tool.name not in later]


def _offered(apis: Sequence[str]) -> list[Tool]:
    """The functions of APIs, as the benchmark describes them to a model."""
    files = importlib.import_module(_BACKENDS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    found: dict[str, Tool] = {}
    for name in apis:
        for row in _rows(_folder() / "data" / "multi_turn_func_doc" / files[name]):
            returned = json.dumps(row["response"])
            description = (
                f"{row['description']} The response field has the following schema: "
                f"{returned}"
            )
            found[row["name"]] = Tool(
                row["name"], description, _schema(row["parameters"])
            )
    return list(found.values())


def _schema(value: Any) -> Any:
    """A schema of the package as JSON Schema."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        # A property may be named "type" as well, and is then an object.
        key: _TYPES.get(each, each)
        if key == "type" and isinstance(each, str)
        else _schema(each)
        for key, each in value.items()
    }


@lru_cache(maxsize=64)
def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _folder() -> Path:
    """Finds the package's folder."""
    found = importlib.util.find_spec("bfcl_eval")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            "bfcl needs the package bfcl-eval, without its dependencies, and mpmath: "
            "pip install --no-deps bfcl-eval; pip install mpmath",
            name="bfcl_eval",
        )
    return Path(found.origin).parent
