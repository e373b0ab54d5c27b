"""Python functions as tools: schema, conversion of arguments, errors for the policy."""

from typing import Literal

import pytest

from jaxrl_post.envs import Task
from jaxrl_post.envs.tools import Functions, ToolError

TASK = Task(0, (), "")


def weather(
    city: str,
    days: list[int],
    *,
    unit: Literal["C", "F"] = "C",
    exact: float | None = None,
) -> dict[str, object]:
    """Tells the weather.

    It is made up.

    Args:
        city: where, a name
            of a city.
        days: which days.
        unit: of the temperature.

    Returns:
        The weather.
    """
    return {"city": city, "days": days, "unit": unit, "exact": exact, "ü": 1}


def refuse(value: int) -> str:
    """Refuses."""
    raise ToolError(f"not {value}")


def err(value: int) -> int:
    """Divides."""
    return value // 0


def test_the_schema_says_what_annotations_and_docstring_say():
    (tool,) = Functions(weather).tools()
    assert tool.to_json() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["city", "days"],
                "properties": {
                    "city": {
                        "type": "string",
                        "description": "where, a name of a city.",
                    },
                    "days": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": "which days.",
                    },
                    "unit": {
                        "type": "string",
                        "enum": ["C", "F"],
                        "default": "C",
                        "description": "of the temperature.",
                    },
                    "exact": {
                        "anyOf": [{"type": "number"}, {"type": "null"}],
                        "default": None,
                    },
                },
            },
        },
    }


def test_arguments_are_converted_and_results_are_json():
    found = Functions(weather).open(TASK)
    result = found.call("weather", {"city": "Köln", "days": ["1", 2]})
    assert result == (
        '{"city": "Köln", "days": [1, 2], "unit": "C", "exact": null, "ü": 1}'
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "city: .*; days: "),
        ({"city": "a", "days": [1], "unit": "K"}, "unit: .*'C' or 'F'"),
        ({"city": "a", "days": ["x"]}, "days.0: "),
        ({"city": "a", "days": [1], "year": 2}, "year: "),
        ({"city": 7, "days": [1]}, "city: "),
    ],
)
def test_wrong_arguments_are_told(arguments, told):
    with pytest.raises(ToolError, match=f"wrong arguments: .*{told}"):
        Functions(weather).call("weather", arguments)


def test_what_a_function_raises_is_no_error_of_its_arguments():
    found = Functions(refuse, err)
    with pytest.raises(ToolError, match=r"^not 3$"):
        found.call("refuse", {"value": 3})
    with pytest.raises(ZeroDivisionError):
        found.call("err", {"value": 3})


def test_functions_that_cannot_be_tools_are_refused():
    def several(*values: int) -> int:
        return sum(values)

    class Odd:
        pass

    def odd(value: Odd) -> str:
        return str(value)

    with pytest.raises(ValueError, match="must have names, got \\*values"):
        Functions(several)
    with pytest.raises(ValueError, match="the function odd cannot be a tool"):
        Functions(odd)
    with pytest.raises(ValueError, match="must have different names"):
        Functions(err, err)
