"""Builds an environment from a specification on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.envs.env import (
    AgentEnvironment,
    Environment,
    StatefulEnvironment,
    StatelessEnvironment,
)
from jaxrl_post.envs.judges import Judged
from jaxrl_post.envs.protocols import NemoGym, OpenEnv, Verifiers
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.bfcl import Bfcl
from jaxrl_post.envs.tasks.facts import facts
from jaxrl_post.envs.tasks.gsm8k import GSM8K
from jaxrl_post.envs.tasks.guess import Guess
from jaxrl_post.envs.tasks.instructions import Instructions
from jaxrl_post.envs.tasks.lookup import lookup
from jaxrl_post.envs.tasks.mixture import (
    AgentMixture,
    Part,
    StatefulMixture,
    StatelessMixture,
    mixture,
)
from jaxrl_post.envs.tasks.nim import Nim
from jaxrl_post.envs.tasks.pictures import DrawnPictures
from jaxrl_post.envs.tasks.programs import Code, Functions, calculate
from jaxrl_post.envs.tasks.prompt_answers import PromptAnswers
from jaxrl_post.envs.tasks.reasoning_gym import ReasoningGym
from jaxrl_post.envs.tasks.sql import Text2SQL
from jaxrl_post.envs.tasks.world import World
from jaxrl_post.jsonl import json_file
from jaxrl_post.specs import call, check_plain, check_takes, imported, parse_query

__all__ = ["make", "named_code"]

_FORMS = (
    "arithmetic, bfcl, calculate, code, facts, functions, gsm8k, guess, instructions, "
    "jsonl, judged, lookup, mixture, nemo-gym, nim, openenv, pictures, text2sql, "
    "verifiers, world, reasoning-gym:<task>, <module>:<factory>"
)
_BY_NAME: Mapping[str, Callable[..., Environment]] = {
    "bfcl": Bfcl,
    "calculate": calculate,
    "code": Code,
    "facts": facts,
    "functions": Functions,
    "gsm8k": GSM8K,
    "guess": Guess,
    "instructions": Instructions,
    "jsonl": PromptAnswers,
    "judged": Judged,
    "lookup": lookup,
    "nemo-gym": NemoGym,
    "nim": Nim,
    "openenv": OpenEnv,
    "pictures": DrawnPictures,
    "text2sql": Text2SQL,
    "verifiers": Verifiers,
    "world": World,
}
# The arguments that the methods of an environment receive.
_METHODS = {
    "tasks": ("split",),
    "demonstration": ("task",),
    "step": ("task", "conversation"),
    "open": ("task",),
    "run": ("task", "base_url"),
}
_REASONING_GYM_ARGUMENTS = ("seed", "train_size", "eval_size", "reward")


def make(spec: str, *, options: Mapping[str, Any] | None = None) -> Environment:
    """Builds the environment that a specification names.

    A specification is a name, followed by a question mark and options:

        arithmetic?level=2                      arithmetic?operations=+-&terms=3
        gsm8k?path=train.jsonl&eval_path=test.jsonl
        guess?size=7&guesses=3                  world?turns=8
        lookup?depth=2                          code?path=problems.jsonl&reward=share
        nim?most=9&skill=1                      facts?passages=3
        calculate?digits=3                      functions?operations=3
        jsonl?path=sums.parquet&prompt=question&answer=answer&grader=math
        instructions?constraints=3              instructions?path=ifeval.jsonl
        pictures?kinds=count,digit&side=32
        text2sql?level=2                        text2sql?path=questions.jsonl&rows=0
        judged?path=prompts.jsonl&url=http://127.0.0.1:8000/v1&kind=compare
        mixture?path=mixture.json
        nemo-gym?url=http://127.0.0.1:9000&path=rows.jsonl
        openenv?url=ws://127.0.0.1:8001/ws&tasks=1000&action=message
        verifiers?python=/envs/verifiers/bin/python&config=env.json
        bfcl?category=multi_turn_base
        reasoning-gym:chain_sum?max_terms=2&max_digits=1&reward=solved
        my_package.my_module:my_factory?temperature=0.5

    A mixture is a file: a JSON list of environments, each with a weight and a name for
    its metrics, as in {"env": "lookup?depth=2", "weight": 3, "name": "keys"}; weight
    and name may be left out.

    A value that is valid JSON (2, 0.5, true, null, [1, 2], "2") is parsed as JSON; any
    other value is a string. The last form imports a module and calls one of its
    functions or classes with the options.

    Args:
        spec: the specification.
        options: more options, for values that cannot be written as text.

    Returns:
        The environment.

    Raises:
        ValueError: if the environment or an option does not exist, an option is missing
            given twice, or of another type than its parameter, or the factory raises or
            returns no environment.

    >>> make("arithmetic?level=3&seed=7").name
    'arithmetic(+-,2x2)'
    >>> make("arithmetics")
    Traceback (most recent call last):
    ValueError: no environment 'arithmetics'; there are arithmetic, bfcl, calculate,
    code, facts, functions, gsm8k, guess, instructions, jsonl, judged, lookup, mixture,
    nemo-gym, nim, openenv, pictures, text2sql, verifiers, world,
    reasoning-gym:<task>, <module>:<factory>; did you mean 'arithmetic'?
    """
    name, _, query = spec.partition("?")
    chosen = parse_query(spec, query)
    for option, value in (options or {}).items():
        if option in chosen:
            raise ValueError(
                f"option {option!r} is given twice, in spec {spec!r} and in options"
            )
        chosen[option] = value
    if name == "arithmetic":
        if "level" in chosen:
            return call(Arithmetic.at_level, chosen, name)
        return call(Arithmetic, chosen, name, also=("level",))
    if name == "mixture":
        return call(_make_mixture, chosen, name)
    if name in _BY_NAME:
        return call(_BY_NAME[name], chosen, name)
    kind, colon, rest = name.partition(":")
    if colon and kind == "reasoning-gym":
        return _make_reasoning_gym(rest, chosen)
    return _made(call(imported(name, "environment", _FORMS), chosen, name), name)


def named_code(spec: str) -> list[tuple[str, str]]:
    """Lists the functions and classes of the user that a specification names.

    Args:
        spec: as `make` takes it, which has made it.

    Returns:
        The kind and the name of each.

    >>> named_code("jsonl?grader=math,my_reward:close")
    [('reward function', 'my_reward:close')]
    >>> named_code("my_module:Shop?size=3"), named_code("reasoning-gym:chain_sum")
    ([('environment', 'my_module:Shop')], [])
    """
    name, _, query = spec.partition("?")
    if name == "mixture":
        rows = json_file(parse_query(spec, query)["path"])
        return [each for row in rows for each in named_code(row["env"])]
    if name == "jsonl":
        graders = str(parse_query(spec, query).get("grader", "")).split(",")
        return [("reward function", each.strip()) for each in graders if ":" in each]
    own = ":" in name and not name.startswith("reasoning-gym:")
    return [("environment", name)] if own else []


def _make_reasoning_gym(task: str, chosen: Mapping[str, Any]) -> Environment:
    own = {key: chosen[key] for key in _REASONING_GYM_ARGUMENTS if key in chosen}
    rest = {key: value for key, value in chosen.items() if key not in own}
    return ReasoningGym(task, options=rest, **own)


def _make_mixture(
    path: str, size: int | None = None
) -> StatelessMixture | StatefulMixture | AgentMixture:
    if not Path(path).exists():
        raise ValueError(f"mixture: {path} does not exist")
    try:
        rows = json_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"mixture: {path} must be a JSON list: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(
            f"{path} must be a JSON list of environments, got {rows!r:.80}"
        )
    parts = []
    for number, row in enumerate(rows):
        where = f"{path}: environment {number}"
        if not isinstance(row, dict) or not isinstance(row.get("env"), str):
            raise ValueError(f"{where} must have the field 'env', got {row!r:.80}")
        unknown = row.keys() - {"env", "weight", "name"}
        if unknown:
            raise ValueError(
                f"{where} has fields {sorted(unknown)}; there are env, weight, name"
            )
        if row["env"].partition("?")[0] == "mixture":
            raise ValueError(f"{where} is a mixture; put its environments into {path}")
        try:
            environment = make(row["env"])
            name = str(row.get("name", environment.name))
            parts.append(Part(environment, row.get("weight", 1), name))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return mixture(parts, size)


def _made(environment: Any, spec: str) -> Environment:
    kinds = StatelessEnvironment | StatefulEnvironment | AgentEnvironment
    if isinstance(environment, type) or not isinstance(environment, kinds):
        found = type(environment).__name__
        if isinstance(environment, type):
            found = f"the class {environment.__name__} itself; call it"
        raise ValueError(
            f"{spec!r} must return an environment (name, tasks, demonstration, and "
            f"step, open or run), got {found}"
        )
    for method, takes in _METHODS.items():
        function = getattr(environment, method, None)
        check_plain(function, f"{spec!r}: {method}")
        check_takes(function, takes, f"{spec!r}: {method}")
    if not isinstance(environment.name, str):
        raise ValueError(
            f"{spec!r}: name must be a text, a field or a property; got "
            f"{type(environment.name).__name__}"
        )
    return environment
