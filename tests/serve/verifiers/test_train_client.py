"""verifiers trains on the tokens that the server's episode has recorded."""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from jaxrl_post.data.tokenizer import Tokenizer
from tests.serve.conftest import (
    CONFIG,
    TEMPLATE,
    listening,
    make_served,
    make_tokenizer,
)

THEIRS = os.environ.get("VERIFIERS_PYTHON")
pytestmark = [
    pytest.mark.skipif(
        THEIRS is None, reason="needs VERIFIERS_PYTHON: make check-verifiers"
    ),
    pytest.mark.processes,
]


@pytest.fixture
def tokenizer(tmp_path) -> tuple[Tokenizer, Path]:
    """One with all tokens that their renderer of Qwen 3 names, and its directory."""
    made = make_tokenizer()
    made.backend.add_special_tokens(["<|endoftext|>"])
    made.backend.add_tokens(["<tool_response>", "</tool_response>"])
    made.backend.save(str(tmp_path / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    whole = Tokenizer(
        made.backend,
        stop_ids=made.stop_ids,
        chat_template=TEMPLATE,
        special_tokens=made.special_tokens,
        num_embeddings=CONFIG.vocab_size,
    )
    return whole, tmp_path


# The episode is named by the base URL, and by the header that their client sends.
@pytest.mark.parametrize("episode", ["named", "trace"])
def test_the_branches_are_those_of_their_trace(tokenizer, episode):
    whole, folder = tokenizer
    served = make_served(whole)
    with listening(served) as url:
        command = [THEIRS, Path(__file__).with_name("theirs.py"), url, folder, episode]
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        theirs = json.loads(done.stdout.splitlines()[-1])
        answer = httpx.get(f"{url}/episodes/{theirs['episode']}")
    served.service.close(60)
    ours = {tuple(each["token_ids"]): each for each in answer.json()["branches"]}
    assert answer.json()["calls"] == {"first": 1, "bridged": 2, "branched": 1}
    assert len(theirs["branches"]) == len(ours) == 2
    for branch in theirs["branches"]:
        own = ours[tuple(branch["token_ids"])]
        sampled = branch["sampled"]
        # The branch that trains on a turn, of the two, has it among its own.
        assert {i for i, each in enumerate(own["sampled"]) if each} <= {
            i for i, each in enumerate(sampled) if each
        }
        told = dict(zip(_places(sampled), _of_sampled(branch), strict=True))
        for place in _places(own["sampled"]):
            drawn = own["logprobs"][place] - own["log_masses"][place]
            assert told[place] == pytest.approx(drawn, abs=1e-5)
    # A sampled token is that which follows one prefix; each is trained on once.
    drawn_by_path = {
        (*branch["token_ids"][: place + 1],)
        for branch in theirs["branches"]
        for place in _places(branch["sampled"])
    }
    assert sum(sum(each["sampled"]) for each in ours.values()) == len(drawn_by_path)


def _places(sampled: list[bool]) -> list[int]:
    return [place for place, own in enumerate(sampled) if own]


def _of_sampled(branch: dict) -> list[float]:
    """The log-probs of the sampled tokens alone, however they are listed."""
    if len(branch["logprobs"]) == len(branch["token_ids"]):
        return [branch["logprobs"][place] for place in _places(branch["sampled"])]
    return branch["logprobs"]
