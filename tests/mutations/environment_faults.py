"""Faults of graders and of built-in environments."""

from tests.mutations.fault import Fault

__all__ = ["ENVIRONMENTS"]

ANSWERS = "envs/test_prompt_answers.py"

ENVIRONMENTS = [
    Fault(
        "a word counts as often as it is said",
        "envs/tasks/token_f1.py",
        "(Counter(mine) & Counter(theirs)).total()",
        "sum(each in theirs for each in mine)",
        ANSWERS,
    ),
    Fault(
        "the first accepted text alone counts",
        "envs/tasks/token_f1.py",
        "max(_f1(mine, each) for each in theirs)",
        "_f1(mine, theirs[0])",
        ANSWERS,
    ),
    Fault(
        "a JSON schema may refer to what is fetched",
        "envs/tasks/json_schema.py",
        "        _require_references(validator, schema, REGISTRY)\n",
        "",
        ANSWERS,
    ),
    Fault(
        "a constant that is not JSON is an answer",
        "envs/tasks/json_schema.py",
        "parse_constant=_refuse, ",
        "",
        ANSWERS,
    ),
]
