"""Log-probs of texts, for notebooks: the trainer's own, of texts of any lengths.

    from jaxrl_post import pretrained, scoring

Sequences are packed into rows as in training, and the trainer's function computes the
log-probs, so the numbers are those on which a loss is computed.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_post.data import packing
from jaxrl_post.data.tokenizer import TextError, Tokenizer
from jaxrl_post.kernels.dispatch import multiply_as_float32
from jaxrl_post.learner.learner import Scorer
from jaxrl_post.learner.model import context_of
from jaxrl_post.learner.step import Policy
from jaxrl_post.models import DecoderParams, ModelConfig
from jaxrl_post.sharding import DEFAULT_RULES, Rules, create_mesh, split_size
from jaxrl_post.types import Array, TokenBatch

__all__ = ["logprobs"]

# Lengths of rows are powers of two from here on: one program is compiled for each.
SHORTEST = 64
# Rows of so many tokens fill a device; longer ones only hold a longer sequence.
FULL = 1024

# A text, or token ids.
type Text = str | Sequence[int] | np.ndarray


def logprobs(
    model: tuple[ModelConfig, DecoderParams[Array]],
    tokenizer: Tokenizer | None,
    prompts: Sequence[Text],
    answers: Sequence[Text],
    *,
    temperature: float = 1.0,
    rules: Rules = DEFAULT_RULES,
) -> list[np.ndarray]:
    """Log-prob of each token of each answer, after its prompt: log p(y_t | x, y_<t).

    A text becomes token ids by itself: a prompt with the special tokens that the
    tokenizer puts around a text (BOS), an answer with none, as it would follow other
    text. So the end-of-sequence token is scored only where an answer has it, such as
    `"7<|im_end|>"`. Give token ids, such as `data.chat.render` returns, if another
    division is meant. A prompt that several answers share is computed once.

    Args:
        model: (config, params), as `pretrained.load` returns. Parameters on a mesh are
            used where they are.
        tokenizer: the model's; None if no text is given.
        prompts: texts or token ids, at least one token each.
        answers: texts or token ids, one for each prompt; an empty one has no log-probs.
        temperature: > 0; divides the logits.
        rules: mesh axes of every logical axis, as `pretrained.load` had them.

    Returns:
        For each answer float32 [tokens of the answer], <= 0 (nats).

    Raises:
        ValueError: the numbers of prompts and answers differ, a prompt is empty, a
            sequence is longer than the model's context, an id lies outside of the
            vocabulary, a text comes without a tokenizer, the temperature is not
            positive, or the model does not predict tokens.

    >>> from jaxrl_post import models
    >>> config = models.ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> params = models.initialize(jax.random.key(0), models.param_specs(config))
    >>> found = logprobs((config, params), None, [[5, 6], [5, 6]], [[7, 8, 1], [9]])
    >>> [each.shape for each in found]
    [(3,), (1,)]
    """
    config, params = model
    if not config.predicts_tokens:
        raise ValueError(
            f"scoring.logprobs: a model with the head {config.head!r} predicts no "
            "tokens; load it with a head for the vocabulary"
        )
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"scoring.logprobs: temperature must be > 0 and finite; got {temperature}"
        )
    if len(prompts) != len(answers):
        raise ValueError(
            "scoring.logprobs: prompts and answers must be of one number, an answer "
            f"for each prompt; got {len(prompts)} and {len(answers)}"
        )
    befores = [
        _ids(tokenizer, text, f"prompts[{n}]", config) for n, text in enumerate(prompts)
    ]
    afters = [
        _ids(tokenizer, text, f"answers[{n}]", config, after=True)
        for n, text in enumerate(answers)
    ]
    for number, (before, after) in enumerate(zip(befores, afters, strict=True)):
        _check(config, before, after, number)
    sizes = [len(after) for after in afters]
    found = np.zeros(sum(sizes), np.float32)
    sequences = _numbered(befores, afters)
    if sequences:
        # As training does.
        multiply_as_float32(params.embedding.dtype)
        mesh = _mesh(params)
        scorer = _scorer(Policy(config, temperature, rules=rules), mesh)
        batch = _packed(sequences, scorer.microbatch_rows)
        with jax.set_mesh(mesh):
            values = scorer.predict(params, batch).logprobs
        assert values is not None
        # A token's number goes with it, wherever it was packed.
        found[batch.versions[batch.loss_mask]] = values[batch.loss_mask]
    return np.split(found, np.cumsum(sizes)[:-1]) if sizes else []


def _ids(
    tokenizer: Tokenizer | None,
    text: Text,
    name: str,
    config: ModelConfig,
    *,
    after: bool = False,
) -> list[int]:
    """Token ids of a text, in the vocabulary.

    Raises:
        ValueError: a text without a tokenizer, no text or token ids, or an id outside
            of the vocabulary.
    """
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError(
                f"scoring.logprobs: {name} is a text, and there is no tokenizer; give "
                "the model's, such as Tokenizer.from_directory(path), or token ids"
            )
        try:
            ids, _ = tokenizer.encode_with_begins(text, special=not after, after=after)
        except TextError as error:
            raise ValueError(f"scoring.logprobs: {name}: {error}") from error
    else:
        array = np.asarray(text)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"scoring.logprobs: {name} must be a text or a list of token ids; got "
                f"an array of {array.dtype} and shape {array.shape}"
            )
        ids = array.tolist()
    bad = [each for each in ids if not 0 <= each < config.vocab_size]
    if bad:
        raise ValueError(
            f"scoring.logprobs: {name}: token ids must lie in "
            f"0..{config.vocab_size - 1}; got {bad[0]}. Is this the model's tokenizer?"
        )
    return list(ids)


def _check(
    config: ModelConfig, before: Sequence[int], after: Sequence[int], number: int
) -> None:
    """Refuses what the model cannot score.

    Raises:
        ValueError: an empty prompt, or a sequence that is too long.
    """
    if not before:
        raise ValueError(
            f"scoring.logprobs: prompts[{number}] has no tokens, so nothing predicts "
            "the first token of its answer; begin it with a token, such as BOS"
        )
    longest = context_of(config)
    if len(before) + len(after) > longest:
        raise ValueError(
            f"scoring.logprobs: prompts[{number}] has {len(before)} tokens and its "
            f"answer {len(after)}, together more than the model's context of "
            f"{longest}; cut one of them"
        )


def _numbered(
    befores: Sequence[Sequence[int]], afters: Sequence[Sequence[int]]
) -> list[packing.Sequence]:
    """Sequences to pack; the version of each answer's token is its number."""
    sequences: list[packing.Sequence] = []
    first = 0
    for before, after in zip(befores, afters, strict=True):
        if after:
            one = packing.Sequence.of(before, after)
            numbers = np.full(len(one.tokens), -1, np.int32)
            numbers[len(before) :] = np.arange(first, first + len(after))
            sequences.append(replace(one, tokens=replace(one.tokens, versions=numbers)))
        first += len(after)
    return sequences


def _packed(sequences: Sequence[packing.Sequence], rows: int) -> TokenBatch:
    """Packs sequences into rows of a power of two tokens, a multiple of `rows`."""
    units = packing.trees(sequences)
    longest = max(len(each.tokens) for each in sequences)
    total = sum(map(packing.num_tokens, units))
    wanted = max(longest, min(FULL, -(-total // rows)))
    length = max(SHORTEST, 1 << (wanted - 1).bit_length())
    return packing.pack(units, length, rows)


def _mesh(params: DecoderParams[Array]) -> Mesh:
    """The mesh of the parameters; of their device, if they are on one alone."""
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    return create_mesh("dp1", list(sharding.device_set))


@functools.lru_cache(maxsize=16)
def _scorer(policy: Policy, mesh: Mesh) -> Scorer:
    """Scorer that keeps what it has compiled, for the next call."""
    return Scorer(policy, mesh, split_size("batch", mesh, policy.rules))
