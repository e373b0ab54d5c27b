"""Bounds on the number of tokens hold, and spare the tokenizer what is far too long."""

import random

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from jaxrl_post.data.lengths import Lengths, written
from jaxrl_post.data.tokenizer import Tokenizer

TEXTS = ["the cat sat on the mat", "12+30=42", "naïve \N{PARTY POPPER} 漢字"] * 3


def sentencepiece() -> Tokenizer:
    """As Llama 2's: byte tokens, a space as another character."""
    vocabulary = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary += ["<s>", "\N{LOWER ONE EIGHTH BLOCK}", *"abcdeht"]
    model = tokenizers.models.BPE(
        {token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    block = "\N{LOWER ONE EIGHTH BLOCK}"
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(block), normalizers.Replace(" ", block)]
    )
    return Tokenizer(backend, stop_ids=[256])


def composing() -> Tokenizer:
    """As Qwen's: NFC, then bytes."""
    tokenizer = Tokenizer.train(TEXTS)
    tokenizer.backend.normalizer = normalizers.NFC()
    return tokenizer


def whole_words() -> Tokenizer:
    """One token may stand for any text."""
    model = tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, stop_ids=[0])


@pytest.mark.parametrize(
    "make", [lambda: Tokenizer.train(TEXTS), sentencepiece, composing]
)
def test_the_bounds_hold(make):
    tokenizer = make()
    lengths = Lengths.of(tokenizer)
    assert lengths.longest is not None
    rng = random.Random(0)
    # Marks that compose, characters that decompose into more, spaces, rare ones.
    alphabet = "abcdeht 12+=\n\t  e\u0301\u1161\u1100\u11a8\ufb2c\U0001d160漢\U0001f389"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(60)))
        size = len(tokenizer.encode(text, special=True))
        most = lengths.at_most(text)
        assert most is not None
        assert size <= most
        for limit in (1, 4, size - 1, size, size + 1, 200):
            if limit > 0:
                assert lengths.fits(text, limit) in (size <= limit, None)


def test_a_text_of_megabytes_is_refused_by_its_characters(monkeypatch):
    tokenizer = composing()
    lengths = Lengths.of(tokenizer)
    text = written(tokenizer, [{"role": "user", "content": "7" * 5_000_000}], "8")

    def encode(*_, **__):
        raise AssertionError("a text that cannot fit was tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    assert lengths.fits(text, 4096) is False


def test_of_a_tokenizer_without_bytes_nothing_is_known():
    lengths = Lengths.of(whole_words())
    assert lengths.at_most("a") is None
    assert lengths.fits("b" * 1000, 1) is None
