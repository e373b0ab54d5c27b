"""Sampling defaults of a model, and settings that cannot be meant."""

import json

import pytest

from jaxrl_post.data.generation import GenerationDefaults, read_generation_defaults
from jaxrl_post.data.tokenizer import TokenizerError


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, GenerationDefaults()),
        ({"eos_token_id": [1, 2], "bos_token_id": 0}, GenerationDefaults()),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            GenerationDefaults(0.6, 20, 0.9),
        ),
        (
            {"temperature": 1, "min_p": 0.05, "max_new_tokens": 2048, "top_k": None},
            GenerationDefaults(1.0, min_p=0.05, max_tokens=2048),
        ),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 9},
            GenerationDefaults(0.0, max_tokens=9),
        ),
        (
            {"repetition_penalty": 1.05, "num_beams": 1, "suppress_tokens": []},
            GenerationDefaults(unsupported={"repetition_penalty": 1.05}),
        ),
        (
            {"do_sample": True, "top_p": 0.9, "stop_strings": ["\n\n"]},
            GenerationDefaults(1.0, top_p=0.9, stop_strings=("\n\n",)),
        ),
        (
            {"do_sample": False, "num_beams": 4, "typical_p": 1.0},
            GenerationDefaults(0.0, unsupported={"num_beams": 4}),
        ),
    ],
)
def test_defaults_are_those_of_the_file(tmp_path, content, expected):
    if content is not None:
        file = tmp_path / "generation_config.json"
        file.write_text(json.dumps(content), encoding="utf-8")
    assert read_generation_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"temperature": "hot"},
            r"temperature of .* must be a number in \[0, inf\]; g",
        ),
        ({"temperature": -1}, r"temperature of .*; got -1; correct the file"),
        ({"temperature": True}, r"temperature of .*; got True"),
        ({"top_p": 0}, r"top_p of .* must be a number in \(0, 1\]; got 0"),
        ({"top_p": 1.5}, r"top_p of .* must be a number in \[0, 1\]; got 1.5"),
        ({"min_p": float("nan")}, r"min_p of .* must be a number in \[0, 1\]; got nan"),
        ({"top_k": 2.5}, r"top_k of .* must be an integer >= 0; got 2.5"),
        ({"max_new_tokens": 0}, r"max_new_tokens of .* an integer >= 1; got 0"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, content, message):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(TokenizerError, match=f"^generation: {message}"):
        read_generation_defaults(tmp_path)
