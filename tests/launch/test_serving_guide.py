"""how-to/serving.md: its commands have options that exist, and its programs run."""

import ast
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from jaxrl_post import serve as serve_package
from jaxrl_post.config.serve import ServeConfig
from launch import cli, serve
from tests.serve.conftest import listening, make_served, make_tokenizer

GUIDE = (Path(__file__).parents[2] / "docs" / "how-to" / "serving.md").read_text(
    encoding="utf-8"
)
ADDRESS = "http://127.0.0.1:8000"


def test_the_command_has_options_that_exist():
    (command,) = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    _, _, program, *arguments = shlex.split(command)
    assert program == "launch.serve"
    config = cli.read_options(serve.PROGRAM, arguments)
    assert f"http://{config.host}:{config.port}" == ADDRESS


def test_every_option_that_is_named_exists():
    known = {f.replace("_", "-") for f in ServeConfig.__dataclass_fields__}
    named = set(re.findall(r"`--([a-z-]+)", GUIDE))
    assert named <= known
    assert len(named) > 8


@pytest.mark.processes
def test_the_programs_of_the_guide_run():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    # tests/serve/test_pictures.py has a model that sees.
    (picture,) = (block for block in blocks if "image_url" in block)
    blocks.remove(picture)
    assert len(blocks) == 5
    tokenizer = make_tokenizer()
    served = make_served(tokenizer)
    names: dict = {}
    told = []
    try:
        with listening(served) as url:
            for block in blocks:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(block.replace(ADDRESS, url), names)
                told.append(out.getvalue().splitlines())
            names["client"].close()
    finally:
        assert served.service.close(60)
    assert len(names["several"].choices) == 4
    assert len(told[0]) >= 5
    assert names["response"].status in ("completed", "incomplete")
    assert names["event"].response.previous_response_id == names["response"].id
    del told[1]
    # A number of up to three digits; the JSON before it may have been cut off.
    assert re.fullmatch("[0-9]{1,3}", told[1][-1])
    ids, logprobs, spans = map(
        ast.literal_eval, (told[2][0].rsplit(" ", 1)[0], *told[2][1:])
    )
    choices = [line.rsplit(" ", 1) for line in told[3]]
    assert [text for text, _ in choices] == ["3+4=7", "3+4=8"]
    assert all(float(value) < 0 for _, value in choices)
    assert len(ids) == len(logprobs) == spans[0]["end"] > 0
    assert all(each < 0 for each in logprobs)


def test_every_status_that_is_sent_is_in_the_table():
    sent = {
        int(status)
        for path in Path(serve_package.__path__[0]).glob("*.py")
        for status in re.findall(r"ApiError\(\s*([45]\d\d)", path.read_text())
    }
    told = {
        int(status) for status in re.findall(r"^\| ([45]\d\d) \|", GUIDE, re.MULTILINE)
    }
    # Metrics of episodes, which the guide of agents has, of clients that left, and of
    # faults.
    assert sent - told <= {409, 499, 500}
    assert told <= sent
