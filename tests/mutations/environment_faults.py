"""Faults of graders and of built-in environments."""

from tests.mutations.fault import Fault

__all__ = ["ENVIRONMENTS"]

ANSWERS = "envs/test_prompt_answers.py"

SEARCH = "envs/tools/test_search.py"

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
    Fault(
        "the worst passages are found",
        "envs/tools/search.py",
        "ORDER BY rank, rowid",
        "ORDER BY rank DESC, rowid",
        SEARCH,
    ),
    Fault(
        "a passage needs all words of a query",
        "envs/tools/search.py",
        '" OR ".join',
        '" AND ".join',
        SEARCH,
    ),
    Fault(
        "a call may ask for any number of passages",
        "envs/tools/search.py",
        "not 1 <= value <= self.max_passages",
        "value < 1",
        SEARCH,
    ),
]
