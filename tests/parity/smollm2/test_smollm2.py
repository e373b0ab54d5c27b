"""SmolLM2-135M-Instruct here, against what transformers and TRL make of it.

`tools/parity.sh` passes what theirs.py wrote, and the directory of the model.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms, pretrained
from jaxrl_post.algorithms import dialects, supervised
from jaxrl_post.data.chat import render, render_text
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner import step
from jaxrl_post.learner.step import Policy
from jaxrl_post.losses import reduce
from jaxrl_post.models import forward, logits
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.types import TokenBatch

TEMPERATURES = (0.7, 1.0, 1.3)
BETA, MAX_COMPLETION = 0.04, 16
TRL = {"kl_coefficient": BETA, "correction": None}
OBJECTIVES = {
    "sft": supervised.next_token,
    "dpo": algorithms.preference.dpo(beta=0.1).objective,
    "dapo": dialects.grpo(dialects.TRL, **TRL).objective,
    "grpo": dialects.grpo(
        dialects.TRL, reduction=reduce.sequence_mean_of_token_mean, **TRL
    ).objective,
    "dr_grpo": dialects.dr_grpo(
        dialects.TRL, denominator=float(MAX_COMPLETION), **TRL
    ).objective,
    "sequences": dialects.trl_grpo(
        ratio_level="sequence", reduction=reduce.sequence_mean_of_token_mean, **TRL
    ).objective,
    "cispo": dialects.cispo(dialects.TRL, ratio_high=1.3, **TRL).objective,
}


@pytest.fixture(scope="module")
def places(request) -> tuple[Path, Path]:
    """The directory of the model, and what theirs.py wrote."""
    model, expected = (
        request.config.getoption(f"--parity-{name}") for name in ("model", "expected")
    )
    if model is None or expected is None:
        raise pytest.UsageError("--parity-model and --parity-expected are needed")
    return model, expected


@pytest.fixture(scope="module")
def expected(places):
    return json.loads((places[1] / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def arrays(places):
    with np.load(places[1] / "expected.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def model(places):
    return pretrained.load(places[0], dtype=jnp.float32)


@pytest.fixture(scope="module")
def tokenizer(places):
    return Tokenizer.from_directory(places[0])


def test_token_ids(expected, tokenizer):
    for text, ids in zip(expected["texts"], expected["ids"], strict=True):
        assert list(tokenizer.encode(text)) == ids, repr(text)


def test_chats(expected, tokenizer):
    for row in expected["chats"]:
        text = render_text(tokenizer, row["messages"], prompt=True)
        assert text == row["text"]
        assert list(render(tokenizer, row["messages"])) == row["ids"]
        assert tokenizer.decode(row["answer"]).strip() == _plain(row["said"])


def _plain(said: str) -> str:
    return said.replace("<|im_end|>", "").strip()


def test_logits(model, arrays):
    config, params = model
    hidden = forward(params, config, jnp.asarray(arrays["tokens"], jnp.int32))
    found = np.asarray(logits(params, config, hidden))
    for row, length in enumerate(arrays["lengths"]):
        wanted = arrays["logits"][row, :length]
        np.testing.assert_allclose(found[row, :length], wanted, rtol=1e-4, atol=2e-4)


def test_greedy_answers(model, tokenizer, expected):
    """By the sampler, with its cache; all prompts at once, where theirs came alone."""
    config, params = model
    rows = expected["chats"]
    longest = max(len(row["ids"]) for row in rows)
    sizes = EngineConfig(
        num_slots=len(rows), max_prompt_tokens=longest, max_tokens=MAX_COMPLETION
    )
    engine = Engine(config, sizes)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=MAX_COMPLETION, stop_ids=tokenizer.stop_ids
    )
    requests = [
        Request(index, tuple(row["ids"]), sampling=sampling)
        for index, row in enumerate(rows)
    ]
    done = sorted(engine.generate(params, requests), key=lambda c: c.prompt_id)
    found = [completion.tokens.ids.tolist() for completion in done]
    assert found == [row["answer"] for row in rows]


def scored(config, params, rows, temperature) -> np.ndarray:
    """Log-probs of the answers' tokens, one row after the other."""
    width = max(len(row["ids"]) + len(row["answer"]) for row in rows)
    tokens, mask = (np.zeros((len(rows), width), np.int32) for _ in range(2))
    for number, row in enumerate(rows):
        start, end = len(row["ids"]), len(row["ids"]) + len(row["answer"])
        tokens[number, :end] = row["ids"] + row["answer"]
        mask[number, start:end] = 1
    lengths = [len(row["ids"]) + len(row["answer"]) for row in rows]
    batch = rows_of(tokens, lengths, mask > 0)
    policy = Policy(config, temperature=temperature, scan=True)
    found = jax.jit(step.predict, static_argnums=0)(policy, params, batch)
    return np.asarray(found.logprobs)[mask > 0]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_logprobs(temperature, places, model, expected, arrays):
    """In bfloat16 each rounds in its own way, so float32 is what both are held to."""
    config, params = model
    wanted = arrays[f"logprobs_float32_{temperature}"]
    found = scored(config, params, expected["chats"], temperature)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    config, params = pretrained.load(places[0], dtype=jnp.bfloat16)
    ours = np.abs(scored(config, params, expected["chats"], temperature) - wanted)
    theirs = np.abs(arrays[f"logprobs_bfloat16_{temperature}"] - wanted)
    assert ours.mean() < 1.25 * theirs.mean(), (ours.mean(), theirs.mean())
    assert ours.max() < 2 * theirs.max(), (ours.max(), theirs.max())


def rows_of(tokens, lengths, mask, **known) -> TokenBatch:
    """A batch of one sequence a row."""
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    lengths = np.asarray(lengths, np.int32)[:, None]
    zeros = np.zeros(tokens.shape, np.float32)
    batch = TokenBatch(
        tokens=tokens.astype(np.int32),
        positions=places,
        ends=np.where(places < lengths, lengths, 0),
        loss_mask=mask,
        advantages=known.pop("advantages", zeros),
        behavior_logprobs=known.get("proximal_logprobs", zeros),
        versions=np.zeros(tokens.shape, np.int32),
        **known,
    )
    return jax.tree.map(jnp.asarray, batch)


def groups(stored) -> TokenBatch:
    """The batch of a GRPO loss: a row has a prompt and an answer, then padding."""
    tokens, prompt, counts = (stored[n] for n in ("tokens", "prompt", "completion"))
    places = np.arange(tokens.shape[1])
    mask = (places >= prompt[:, None]) & (places < (prompt + counts)[:, None])
    known = {}
    for name in ("old", "reference"):
        known[name] = np.zeros(tokens.shape, np.float32)
        for row, (start, count) in enumerate(zip(prompt, counts, strict=True)):
            known[name][row, start : start + count] = stored[name][row, :count]
    advantages = np.where(mask, stored["advantages"][:, None], 0.0)
    return rows_of(
        tokens,
        prompt + counts,
        mask,
        advantages=advantages.astype(np.float32),
        proximal_logprobs=known["old"],
        reference_logprobs=known["reference"],
    )


def pairs(stored) -> TokenBatch:
    """The batch of DPO: the chosen answers come first, and a pair is one row here."""
    half = len(stored["tokens"]) // 2
    fields = {name: [] for name in ("tokens", "counted", "reference")}
    positions, ends, labels = [], [], []
    for chosen in range(half):
        sizes = [int(stored["lengths"][row]) for row in (chosen, half + chosen)]
        for name, rows in fields.items():
            each = zip((chosen, half + chosen), sizes, strict=True)
            rows.append(np.concatenate([stored[name][row, :n] for row, n in each]))
        positions.append(np.concatenate([np.arange(n) for n in sizes]))
        ends.append(np.repeat(np.cumsum(sizes), sizes))
        labels.append(np.repeat([1.0, -1.0], sizes))
    width = max(map(len, ends))

    def laid(rows, dtype):
        return np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype(
            dtype
        )

    tokens = laid(fields["tokens"], np.int32)
    zeros = np.zeros(tokens.shape, np.float32)
    batch = TokenBatch(
        tokens=tokens,
        positions=laid(positions, np.int32),
        ends=laid(ends, np.int32),
        loss_mask=laid(fields["counted"], bool),
        advantages=zeros,
        behavior_logprobs=zeros,
        versions=np.zeros(tokens.shape, np.int32),
        reference_logprobs=laid(fields["reference"], np.float32),
        labels=laid(labels, np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


def batch_of(name, stored) -> TokenBatch:
    """The batch of a loss."""
    if name == "dpo":
        return pairs(stored)
    if name == "sft":
        return rows_of(stored["tokens"], stored["lengths"], stored["counted"])
    return groups(stored)


@partial(jax.jit, static_argnums=(0, 1))
def gradient_of(policy, objective, params, batch):
    """The mean loss and its gradient, as a train step computes them."""
    empty = step.empty_accumulator(policy, objective, params, batch)
    sums = step.accumulate(policy, objective, params, empty, batch)
    return sums.loss.mean(), jax.tree.map(lambda g: g / sums.loss.count, sums.grads)


def norm(tree):
    """The Euclidean norm of all leaves together."""
    squares = [float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(tree)]
    return math.sqrt(math.fsum(squares))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_those_of_trl(name, places, model, expected, capsys):
    config, params = model
    with np.load(places[1] / f"{name}.npz") as stored:
        batch = batch_of(name, dict(stored))
    policy = Policy(config, scan=True)
    loss, gradient = gradient_of(policy, OBJECTIVES[name], params, batch)
    _, wanted = pretrained.load(places[1] / name, dtype=jnp.float32)
    apart = norm(jax.tree.map(jnp.subtract, gradient, wanted))
    whole = norm(wanted)
    theirs = expected["losses"][name]
    with capsys.disabled():
        sys.stdout.write(
            f"\n{name}: loss {loss:.6f}, TRL's {theirs:.6f}; norm of the gradient "
            f"{whole:.4g}, of the difference {apart / whole:.1e} of it\n"
        )
    np.testing.assert_allclose(loss, theirs, rtol=1e-4, atol=1e-6)
    assert apart < 2e-4 * whole
