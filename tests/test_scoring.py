"""Log-probs of texts equal what the trainer and a plain loop compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxrl_post import scoring
from jaxrl_post.data.packing import Sequence, pack
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.models import forward, logits
from jaxrl_post.sharding import create_mesh
from tests import tiny

CONFIG = tiny.CONFIG
MODEL = CONFIG, tiny.shared()
# The lengths differ. Some prompts are equal, one begins with a prompt and its answer,
# and the second answer is given twice.
PROMPTS = [[5, 9, 2], [5, 9, 2], [7], [5, 9, 2, 11, 4], [5, 9, 2]]
ANSWERS = [[11, 4, 3, 8], [30], [1, 2], [6, 6, 6], [30]]


def by_loop(prompt, answer, temperature=1.0):
    """One log-prob a forward pass, log-softmax in float64."""
    row, found = list(prompt), []
    for token in answer:
        hidden = forward(MODEL[1], CONFIG, jnp.asarray([row]))[0, -1]
        scores = np.asarray(logits(MODEL[1], CONFIG, hidden), np.float64)
        found.append(log_softmax(scores / temperature)[token])
        row.append(token)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_equal_a_loop_over_whole_forwards(temperature):
    found = scoring.logprobs(MODEL, None, PROMPTS, ANSWERS, temperature=temperature)
    assert [each.dtype for each in found] == [np.float32] * 5
    for prompt, answer, own in zip(PROMPTS, ANSWERS, found, strict=True):
        expected = by_loop(prompt, answer, temperature)
        np.testing.assert_allclose(own, expected, atol=2e-5)
    np.testing.assert_array_equal(found[1], found[4])


def test_they_equal_the_trainers_to_the_last_bits():
    found = scoring.logprobs(MODEL, None, PROMPTS, ANSWERS)
    for prompt, answer, own in zip(PROMPTS, ANSWERS, found, strict=True):
        batch = pack([Sequence.of(prompt, answer)], length=64, row_multiple=1)
        trained = jax.jit(predict, static_argnums=0)(Policy(CONFIG), MODEL[1], batch)
        values = np.asarray(trained.logprobs)[batch.loss_mask]
        np.testing.assert_allclose(own, values, rtol=1e-6, atol=1e-6)


def test_many_lengths_compile_few_programs(monkeypatch):
    rng = np.random.default_rng(0)
    shapes = set()
    one = scoring._scorer(Policy(CONFIG, 1.25), scoring._mesh(MODEL[1]))
    compiled = one._predict
    for count in range(1, 40):
        sizes = rng.integers(1, 30, (2, count))
        prompts, answers = ([rng.integers(0, 40, n) for n in row] for row in sizes)
        found = scoring.logprobs(MODEL, None, prompts, answers, temperature=1.25)
        assert [len(each) for each in found] == sizes[1].tolist()
        shapes.add(compiled._cache_size())
    assert max(shapes) <= 5


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp2,tp2", "fsdp4", "cp2"])
def test_they_are_the_same_on_a_mesh(spec):
    mesh = create_mesh(spec, jax.devices()[: 2 if spec == "cp2" else 4])
    params = tiny.params(mesh=mesh)
    alone = scoring.logprobs(MODEL, None, PROMPTS, ANSWERS)
    found = scoring.logprobs((CONFIG, params), None, PROMPTS, ANSWERS)
    for own, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5)


@pytest.fixture(scope="module")
def tokenizer():
    """Puts <|pad|> before a text, as others put BOS."""
    from tokenizers.processors import TemplateProcessing

    trained = Tokenizer.train(["1+2=3"] * 3, vocab_size=262)
    trained.backend.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 0)]
    )
    return trained


TEXTS = dataclasses.replace(CONFIG, vocab_size=262)


def test_texts_are_their_token_ids(tokenizer):
    model = TEXTS, tiny.params(TEXTS)
    prompts, answers = ["1+2=", "", "3"], ["3", "1<|eos|>", ""]
    found = scoring.logprobs(model, tokenizer, prompts, answers)
    # BOS stands before a prompt, and EOS is scored where it is written.
    assert [len(each) for each in found] == [1, 2, 0]
    before = [tokenizer.encode(text, special=True) for text in prompts]
    assert before[1] == (0,)
    after = [tokenizer.encode(text) for text in answers]
    ids = scoring.logprobs(model, None, before, after)
    for own, other in zip(found, ids, strict=True):
        np.testing.assert_array_equal(own, other)


def test_nothing_to_score():
    assert scoring.logprobs(MODEL, None, [], []) == []
    [none] = scoring.logprobs(MODEL, None, [[5]], [[]])
    assert none.shape == (0,)
    assert none.dtype == np.float32


@pytest.mark.parametrize(
    ("prompts", "answers", "said"),
    [
        ([[5]], [], "got 1 and 0"),
        ([[5], []], [[5], [5]], r"prompts\[1\] has no tokens"),
        ([[5] * 40], [[6] * 25], "prompts.0. has 40 tokens and its answer 25, toget"),
        ([[5]], [[40]], r"answers\[0\]: token ids must lie in 0..39; got 40"),
        ([[-1]], [[4]], r"prompts\[0\]: token ids must lie in 0..39; got -1"),
        (["5"], [[4]], r"prompts\[0\] is a text, and there is no tokenizer"),
        (
            [np.array([0.5])],
            [[4]],
            r"prompts\[0\] must be a text or a list of token ids",
        ),
        (
            [[5]],
            [np.array([[4]])],
            r"answers\[0\] must be a text or a list of token ids",
        ),
    ],
)
def test_what_cannot_be_scored_is_refused(prompts, answers, said):
    with pytest.raises(ValueError, match=said):
        scoring.logprobs(MODEL, None, prompts, answers)


def test_a_sequence_as_long_as_the_context_is_scored():
    [found] = scoring.logprobs(MODEL, None, [[5] * 39], [[6] * 25])
    assert np.isfinite(found).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_scores_nothing(temperature):
    with pytest.raises(ValueError, match="temperature must be > 0 and finite"):
        scoring.logprobs(MODEL, None, [[5]], [[6]], temperature=temperature)


def test_a_reward_model_has_no_log_probs():
    config = dataclasses.replace(CONFIG, head="value")
    with pytest.raises(ValueError, match="predicts no tokens"):
        scoring.logprobs((config, MODEL[1]), None, [[5]], [[6]])


def test_half_a_character_is_no_text(tokenizer):
    with pytest.raises(ValueError, match=r"answers\[0\]: .*half of a surrogate pair"):
        scoring.logprobs((TEXTS, tiny.params(TEXTS)), tokenizer, ["1"], ["caf\ud83d"])
