"""The last fenced block of a response."""

import re
import time

import pytest

from jaxrl_post.envs.tasks.blocks import last_block

# The definition, which takes quadratic time.
BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no block",
        "```",
        "```\n",
        "```\n```",
        "```py\na\n```",
        "```py\na\n``` \t\nb",
        " ```py\na\n\t```\n```\nb\n```\n",
        "```a\n```b\nc\n```",
        "```a\nb\n```\n```c\nd",
        "```a\nb\n```x\nc",
        "``````\na\n```",
        "a ```\nb\n```\n c\n```",
        "```\r\na\r\n```\r\n",
        "```\na\n```\n```\n```\n```\nb",
    ],
)
def test_it_is_what_the_pattern_finds(text):
    found = BLOCK.findall(text)
    assert last_block(text) == (found[-1] if found else text)


def test_it_takes_linear_time():
    text = "```x\n" * 200_000
    began = time.process_time()
    assert last_block(text) == text
    assert time.process_time() - began < 5
