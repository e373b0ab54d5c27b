"""Grammars token by token: marks with tokens of their own, reasoning, dead ends."""

import numpy as np
import pytest

from jaxrl_post.sampler.requests import ConstraintError
from jaxrl_post.serve.grammars.compiler import GrammarError, Grammars
from tests.serve.conftest import CONFIG


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, CONFIG.vocab_size)


def allowed(constraint):
    bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def after(constraint, tokens):
    """Tokens that may follow the given ones, each of which must be allowed."""
    for token in tokens:
        assert token in allowed(constraint)
        constraint.advance(token)
    return allowed(constraint)


MARKED = "a<think>b"


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (lambda g: g.regex(MARKED), [MARKED]),
        (lambda g: g.regex("<think>[a-c]+</think>[0-9]"), ["<think>ab</think>7"]),
        (lambda g: g.regex(r"x|(?:y|z)<think>\|"), ["x", "y<think>|", "z<think>|"]),
        (lambda g: g.regex("(?s)<think>.*</think>/"), ["<think>a\nb</think>/"]),
        (lambda g: g.choice([MARKED, "ab"]), [MARKED, "ab"]),
        (lambda g: g.choice(["<think>", '<tool_call>"']), ["<think>", '<tool_call>"']),
        (lambda g: g.json({"const": MARKED}), [f'"{MARKED}"']),
        (lambda g: g.json({"type": "string", "pattern": "^<think>x$"}), ['"<think>x"']),
        (lambda g: g.lark('start: "a<think>b"'), [MARKED]),
        (lambda g: g.lark("start: <think> /[ab]/"), ["<think>b"]),
    ],
)
def test_a_mark_in_a_literal_is_its_token(grammars, tokenizer, make, texts):
    for text in texts:
        ids = tokenizer.encode(text)
        marks = tokenizer.backend.get_added_tokens_decoder()
        assert bool(marks.keys() & set(ids)) == ("<" in text)
        stops = set(tokenizer.stop_ids)
        assert stops <= after(make(grammars)(), ids), text
        assert not stops & after(make(grammars)(), ids[:-1]), text


@pytest.mark.parametrize("mark", ["<|im_end|>", "<|im_start|>"])
def test_a_mark_that_would_not_be_in_the_text_is_spelled(grammars, tokenizer, mark):
    # <|im_end|> would end the sample, and <|im_start|> be left out of its text.
    spelled = [token for each in mark for token in tokenizer.encode(each)]
    before, behind = tokenizer.encode("a"), tokenizer.encode("b")
    constraint = grammars.choice([f"a{mark}b"])()
    found = after(constraint, before)
    assert found == {spelled[0]}
    rest = grammars.vocabulary.greedy_tokenize(mark)
    assert set(tokenizer.stop_ids) <= after(constraint, [*rest, *behind])


def test_a_mark_in_a_group_is_spelled(grammars, tokenizer):
    spelled = grammars.vocabulary.greedy_tokenize("<think>")
    found = after(grammars.regex("(a|<think>)+")(), [*spelled, *tokenizer.encode("a")])
    assert set(tokenizer.stop_ids) <= found


@pytest.mark.parametrize(
    ("make", "answer"),
    [
        (lambda g: g.json({"enum": ["x"]}, thinking=True), '"x"'),
        (lambda g: g.regex("x[0-9]", thinking=True), "x1"),
        (lambda g: g.regex("<tool_call>x", thinking=True), "<tool_call>x"),
        (lambda g: g.choice(["no"], thinking=True), "no"),
        (lambda g: g.lark('start: thoughts\nthoughts: "x"', thinking=True), "x"),
    ],
)
@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_an_answer_comes_after_the_reasoning(
    grammars, tokenizer, make, answer, between
):
    whole = f'Two\n"lines".</think>{between}{answer}'
    ids = tokenizer.encode(whole)
    assert set(tokenizer.stop_ids) <= after(make(grammars)(), ids)
    # The answer has to come.
    thoughts = tokenizer.encode("Two</think>")
    assert not set(tokenizer.stop_ids) & after(make(grammars)(), thoughts)


def test_a_dead_end_is_an_error_and_no_end(grammars, tokenizer):
    constraint = grammars.lark('start: "a" X\nX: /b/ & /c/')()
    (token,) = tokenizer.encode("a")
    assert allowed(constraint) == {token}
    with pytest.raises(ConstraintError, match="the answer is not complete"):
        constraint.advance(token)


def test_what_nothing_satisfies_is_refused(grammars):
    with pytest.raises(GrammarError, match="grammar: "):
        grammars.lark("start: X\nX: /b/ & /c/")


def test_samples_of_a_grammar_do_not_share_their_state(grammars, tokenizer):
    make = grammars.choice(["ab", "ac"])
    one, other = make(), make()
    one.advance(tokenizer.encode("a")[0])
    assert allowed(one) != allowed(other)
    assert allowed(other) == allowed(make())
