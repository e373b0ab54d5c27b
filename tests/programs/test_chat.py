"""A conversation in the terminal: what was said stays, and what goes wrong is told."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxrl_post import models
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.serve import ChatConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs.tasks.lookup import lookup
from jaxrl_post.examples.texts import environment_tokenizer, tokenizer_of
from jaxrl_post.learner.model import Model, save_model
from jaxrl_post.models import ModelConfig
from jaxrl_post.programs.chat import ContextError, Conversation, _talk
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh

CONFIG = ModelConfig(
    "qwen2", 320, 32, 64, 1, num_heads=4, num_kv_heads=2, max_length=256,
    qkv_bias=True, tie_embeddings=True,
)  # fmt: skip
CHAT = ChatConfig(model="tiny", max_tokens=12, temperature=1.0, seed=3)
TABLE = "jaxrl_post.envs.tasks.lookup:Table"


def make_model(tokenizer) -> Model:
    mesh = create_mesh("dp1", jax.devices()[:1])
    specs = models.param_specs(CONFIG)
    params = models.initialize(jax.random.key(0), specs, jnp.float32, mesh)
    return Model(
        "tiny", CONFIG, specs, params, tokenizer, mesh, DEFAULT_RULES, preset=True
    )


@pytest.fixture(scope="module")
def plain():
    return make_model(tokenizer_of(lambda: ["What is 1 + 2?"], 300))


@pytest.fixture(scope="module")
def with_tools():
    return make_model(environment_tokenizer(lookup(), 320))


@pytest.fixture
def stopping(monkeypatch):
    """Every token ends an answer, so that none is cut."""
    every = property(lambda self: tuple(range(CONFIG.vocab_size)))
    monkeypatch.setattr(Tokenizer, "stop_ids", every)


def opened(model, **changes) -> Conversation:
    with jax.set_mesh(model.mesh):
        return Conversation(dataclasses.replace(CHAT, **changes), model)


def test_what_was_said_stays_as_it_was_sampled(plain):
    conversation = opened(plain)
    first = "".join(conversation.say("What is 1 + 2?"))
    tokens = conversation._tokens
    prompt = plain.tokenizer.encode("What is 1 + 2?")
    assert tokens[: len(prompt)] == prompt
    said = plain.tokenizer.decode(tokens[len(prompt) :])
    assert first == said or first == said + "[cut: --max-tokens]"
    second = "".join(conversation.say("And 3?"))
    assert second
    assert conversation._tokens[: len(tokens)] == tokens
    again = plain.tokenizer.encode("And 3?")
    between = conversation._tokens[len(tokens) :]
    # A turn that was cut gets its end as context.
    assert again == between[: len(again)] or again == between[1 : len(again) + 1]
    roles = [message.role for message in conversation._messages]
    assert roles == ["user", "assistant"] * 2


def test_the_seed_decides_what_is_said(plain):
    def talk(seed):
        conversation = opened(plain, seed=seed)
        return ["".join(conversation.say(text)) for text in ("a", "b")]

    assert talk(1) == talk(1) != talk(2)


def test_an_answer_can_be_stopped(plain):
    conversation = opened(plain, max_tokens=60)
    pieces = conversation.say("What is 1?")
    shown = next(pieces) or next(pieces)
    pieces.close()
    answer = conversation._messages[-1]
    assert answer.role == "assistant"
    assert answer.truncated
    assert answer.content.startswith(shown)
    assert answer.num_tokens < 60
    # The conversation continues from there.
    assert "".join(conversation.say("And?"))
    conversation.reset()
    assert conversation._messages == ()


def test_a_conversation_that_no_longer_fits_stays_as_it_was(plain):
    conversation = opened(plain, system="Be brief.")
    list(conversation.say("1"))
    before = conversation._messages, conversation._tokens
    with pytest.raises(ContextError, match=r"room for 244 before an answer of 12"):
        list(conversation.say("word " * 300))
    assert (conversation._messages, conversation._tokens) == before
    assert conversation._messages[0].role == "system"


def test_tools_are_written_and_their_session_is_closed(with_tools):
    conversation = opened(with_tools, tools=(TABLE,))
    list(conversation.say("4821?"))
    text = with_tools.tokenizer.backend.decode(
        list(conversation._tokens), skip_special_tokens=False
    )
    assert text.startswith("look(key)\n4821?")
    first = conversation._session
    conversation.reset()
    assert conversation._session is not first
    conversation.close()


def test_calls_are_carried_out(with_tools, stopping, monkeypatch):
    # A model that has learned to call is too large for a test: its answers are read.
    from jaxrl_post.data.codec import Codec
    from jaxrl_post.data.replies import Reply
    from jaxrl_post.messages import ToolCall

    replies = [
        Reply("", calls=(ToolCall("look", '{"key": "4821"}'),)),
        Reply("", calls=(ToolCall("find", "{}"),)),
        Reply("", broken=1),
        Reply("done"),
    ]

    def read(self, prompt, said, tools):
        return replies.pop(0)

    monkeypatch.setattr(Codec, "read", read)
    conversation = opened(with_tools, tools=(TABLE,), max_tokens=2, max_turns=4)
    shown = "".join(conversation.say("4821?"))
    assert not replies
    said = [m.content for m in conversation._messages if m.role in ("tool", "user")]
    assert len(said) == 4
    assert said[1].isdecimal()
    assert f"> {said[1]}" in shown
    assert "> error: there is no tool 'find'" in shown
    assert "1 of the calls could not be read" in shown


def test_turns_that_only_call_tools_end(with_tools, stopping, monkeypatch):
    from jaxrl_post.data.codec import Codec
    from jaxrl_post.data.replies import Reply

    broken = Reply("", broken=1)
    monkeypatch.setattr(Codec, "read", lambda self, prompt, said, tools: broken)
    conversation = opened(with_tools, tools=(TABLE,), max_tokens=2, max_turns=2)
    assert "[no more turns: --max-turns]" in "".join(conversation.say("?"))


def test_what_cannot_be_is_told(plain, with_tools):
    with pytest.raises(ConfigError, match="--tools: the model cannot be given any"):
        opened(plain, tools=(TABLE,))
    with pytest.raises(ConfigError, match="--tools: no tools 'perl'"):
        opened(with_tools, tools=("perl",))
    with pytest.raises(ConfigError, match="--max-tokens: 256 leaves no room"):
        opened(plain, max_tokens=256)


def test_lines_are_read_until_the_end(plain, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"1\n\n/reset\n{'long ' * 300}\n2\n"))
    console = Console(file=io.StringIO())
    conversation = opened(plain, max_tokens=2)
    _talk(conversation, console)
    written = console.file.getvalue()
    assert "/reset begins a new one" in written
    # The first message was forgotten, the one that was too long never taken.
    said = [m.content for m in conversation._messages if m.role == "user"]
    assert said == ["2"]


@pytest.mark.processes
def test_control_sequences_of_a_model_are_shown(monkeypatch):
    class Wild(Conversation):
        def __init__(self):
            pass

        def say(self, text):
            # A sequence may be cut anywhere.
            yield from ("\x1b", "]52;c;eA==", "\x07\b", "\u202e\u200f", "\x9b", "31m")

    lines = iter(["hello"])
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(console, "input", lambda prompt: next(lines, None) or _end())
    _talk(Wild(), console)
    said = console.file.getvalue()
    assert "␛]52;c;eA==␇␈[U+202E][U+200F][U+009B]31m" in said
    assert not set(said) & set("\x1b\x07\b\x9b\u202e\u200f")


def _end():
    raise EOFError


def test_the_program_talks_to_a_finished_run(plain, tmp_path, monkeypatch, capsys):
    from launch import chat

    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert chat.main([str(run)]) == 1
    assert "has checkpoints but no config.json" in capsys.readouterr().out
    save_model(run / "model", plain, plain.params)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 + 2?\n"))
    assert chat.main([str(run), "--max-tokens=3"]) == 0
    assert f"{run}: /reset begins" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("sys.stdin", io.StringIO("7>8>9=\n"))
    assert chat.main(["demo", "--max-tokens=3"]) == 0
    assert "demo: /reset begins" in capsys.readouterr().out
