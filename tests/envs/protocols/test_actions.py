"""A policy's text as an action, and an observation as the policy's text."""

import pytest

from jaxrl_post.envs.protocols.actions import (
    ActionError,
    action_of,
    check_field,
    text_of_observation,
)

FIELDS = {
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "choice": {"enum": ["left", "right"]},
        "any": {},
        "metadata": {"type": "object"},
    }
}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"a": 1}', {"a": 1}),
        ('First {"a": 1}, then {"a": {"b": 2}}.', {"a": {"b": 2}}),
        ('<think>{"a": 1}</think>\n{"a": 2}', {"a": 2}),
        ('{ {"a": 1} and { more', {"a": 1}),
        ('```json\n{"a": "{}"}\n```', {"a": "{}"}),
    ],
)
def test_the_last_object_is_the_action(text, action):
    assert action_of(text, None, FIELDS) == action


@pytest.mark.parametrize(
    "text", ["", "east", "[1]", '{"a": ', '{"a": NaN}', '<think>{"a": 1}</think>', "{"]
)
def test_a_text_without_an_object_is_no_action(text):
    with pytest.raises(ActionError, match="must hold an action, a JSON object, got"):
        action_of(text, None, FIELDS)


def test_a_text_of_braces_is_read_in_time():
    with pytest.raises(ActionError):
        action_of('{"a":' * 5000, None, FIELDS)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (" go east\n", "text", "go east"),
        ("7", "text", "7"),
        ("7", "number", 7),
        ("7", "maybe", "7"),
        ("left", "choice", "left"),
        ("[1, 2]", "any", "[1, 2]"),
        ("<think>8?</think>7", "number", 7),
    ],
)
def test_a_text_may_be_a_field(text, field, value):
    assert action_of(text, field, FIELDS) == {field: value}


def test_a_field_of_another_type_must_be_json():
    with pytest.raises(ActionError, match="nothing but the number, of type integer"):
        action_of("about 7", "number", FIELDS)


def test_fields_that_do_not_make_an_action_are_refused():
    check_field(None, FIELDS)
    check_field("text", {**FIELDS, "required": ["text"]})
    with pytest.raises(ValueError, match="no field 'tex'; they have text, number"):
        check_field("tex", FIELDS)
    with pytest.raises(ValueError, match="no field 'metadata'"):
        check_field("metadata", FIELDS)
    with pytest.raises(ValueError, match="need more than the field 'text': number"):
        check_field("text", {**FIELDS, "required": ["number", "text"]})


@pytest.mark.parametrize(
    ("observation", "field", "text"),
    [
        ({"a": "x", "metadata": {"b": 1}, "reward": 1, "done": False}, None, "x"),
        ({"a": "x", "b": None}, None, "x"),
        ({"a": "x", "b": "ü"}, None, '{"a": "x", "b": "ü"}'),
        ({"a": [1]}, None, "[1]"),
        ({}, None, "{}"),
        ({"a": "x", "b": [1]}, "b", "[1]"),
        ({"a": None}, "a", "null"),
    ],
)
def test_an_observation_is_read_as_a_text(observation, field, text):
    assert text_of_observation(observation, field) == text


def test_an_observation_without_the_field_is_refused():
    with pytest.raises(ValueError, match="no field 'b'; it has a"):
        text_of_observation({"a": 1}, "b")
    with pytest.raises(ValueError, match="must be an object, got 'a'"):
        text_of_observation("a", None)
