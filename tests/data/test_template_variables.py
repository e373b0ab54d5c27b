"""Variables that a tokenizer gives its chat template."""

import datetime
from pathlib import Path

import pytest

from jaxrl_post.data import chat, learned
from jaxrl_post.data.templates import names_read, tells_time
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

TEMPLATES = Path(__file__).parents[1] / "parity/chat_templates"
ASKS = (
    "{{ strftime_now('%d %b %Y') }} {{ effort | default('low') }}\n"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if think is defined and think is false %}<done>{% endif %}"
)
ROWS = [{"role": "user", "content": "1"}]
DAY = datetime.datetime(2026, 11, 26)


def tokenizer(template: str | None = ASKS) -> Tokenizer:
    return Tokenizer.train(["12"], chat_template=template)


def test_a_template_reads_what_its_tokenizer_has_and_a_request_goes_before():
    given = tokenizer().with_template(variables={"think": False}, now=DAY)
    assert chat.render_text(given, ROWS) == (
        "26 Nov 2026 low\nuser:1<|eos|>assistant:<done>"
    )
    request = chat.Options(
        variables={"think": True, "effort": "high"}, now=datetime.datetime(2025, 1, 2)
    )
    assert chat.render_text(given, ROWS, request).startswith("02 Jan 2025 high\n")
    assert "<done>" not in chat.render_text(given, ROWS, request)


def test_every_way_to_tokens_reads_them():
    given = tokenizer().for_model(1000).with_template(variables={"effort": 7}, now=DAY)
    head = "26 Nov 2026 7\nuser:1"
    assert given.decode(chat.render(given, ROWS)).startswith(head)
    answered, _ = learned.answered(given, ROWS, "2")
    assert given.decode(answered).startswith(head)
    said = [*ROWS, {"role": "assistant", "content": "2"}]
    [(ids, _)] = learned.conversation(given, said)
    assert given.decode(ids.tolist()).startswith(head)
    # The head before an answer is the same in the longer conversation.
    assert chat.render_reply(given, said, ROWS, stop_id=given.eos_id)
    assert given.for_model(900).variables == {"effort": 7}


def test_the_saved_files_have_neither(tmp_path):
    for name, each in (
        ("plain", tokenizer()),
        ("given", tokenizer().with_template(variables={"effort": 1}, now=DAY)),
    ):
        (tmp_path / name).mkdir()
        each.save(tmp_path / name)
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "given" / file.name).read_bytes()


def test_a_variable_that_is_not_read_is_refused_with_those_that_are():
    with pytest.raises(
        TokenizerError, match=r"does not read efort; it reads effort, think$"
    ):
        tokenizer().with_template(variables={"efort": 1, "think": True})
    with pytest.raises(TokenizerError, match="does not read messages"):
        tokenizer().with_template(variables={"messages": []})
    with pytest.raises(TokenizerError, match="without a chat template nothing reads"):
        tokenizer(None).with_template(variables={"think": True})


@pytest.mark.parametrize(
    ("name", "read", "dated"),
    [
        ("qwen3", {"enable_thinking"}, False),
        ("harmony", {"reasoning_effort"}, True),
        ("llama3_1", {"date_string"}, True),
        ("qwen2_5", set(), False),
    ],
)
def test_the_variables_of_templates_in_use_are_known(name, read, dated):
    source = (TEMPLATES / f"{name}.jinja").read_text()
    assert names_read(source) >= read
    assert tells_time(source) == dated


def test_a_stop_token_that_depends_on_a_variable_is_that_of_its_value():
    ends = (
        "{% for m in messages %}{{ m.content }}"
        "{{ '<|pad|>' if short else '<|eos|>' }}{% endfor %}"
    )
    plain = tokenizer(ends)
    assert plain.turn_end == "<|eos|>"
    assert plain.with_template(variables={"short": True}).turn_end == "<|pad|>"
