"""Plants the known faults of RL runs in a trainer, to prove that the rules name them.

A trap changes what one part of a run hands to the next, as a fault in that part would.
It is planted for a test, never in a run that is meant to learn.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.data import packing
from jaxrl_post.programs.rl import OnlineTrainer
from jaxrl_post.rollout.episode import Group
from jaxrl_post.rollout.weights import Published
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import PyTree

__all__ = ["TRAPS", "Trap"]


@dataclass(frozen=True)
class Trap:
    """A fault, and the rules that name it.

    Attributes:
        fault: in words.
        plant: puts it into a trainer before its first step.
        rules: any of them names it.
        reference: whether the run needs a reference policy.
    """

    fault: str
    plant: Callable[[OnlineTrainer], None]
    rules: tuple[str, ...]
    reference: bool = False


def _sampler(trainer: OnlineTrainer, change: Callable[[Published], Published]) -> None:
    """Changes the sampler that the trainer publishes."""
    weights: Any = trainer.weights
    publish = weights.publish
    weights.publish = lambda: change(publish())


def _sequences(
    trainer: OnlineTrainer, change: Callable[[packing.Sequence], packing.Sequence]
) -> None:
    """Changes the sequences that episodes become."""
    updater: Any = trainer.updater
    made = updater.sequences

    def sequences(groups: Sequence[Group]) -> tuple[Any, ...]:
        found, *others = made(groups)
        return [change(each) for each in found], *others

    updater.sequences = sequences


def _mismatch(trainer: OnlineTrainer) -> None:
    def change(sampler: Published) -> Published:
        params = jax.tree.map(lambda leaf: leaf * 1.05, sampler.params)
        return Published(sampler.engine, params, sampler.version)

    _sampler(trainer, change)


def _stale(trainer: OnlineTrainer, *, told: bool) -> None:
    kept: list[PyTree] = []

    def change(sampler: Published) -> Published:
        if not kept:
            # The trainer donates its arrays to the first update.
            kept.append(jax.tree.map(jnp.copy, sampler.params))
        return Published(sampler.engine, kept[0], 0 if told else sampler.version)

    _sampler(trainer, change)


def _shifted(trainer: OnlineTrainer) -> None:
    def change(sequence: packing.Sequence) -> packing.Sequence:
        moved = np.roll(sequence.advantages, 1)
        return dataclasses.replace(sequence, advantages=moved)

    _sequences(trainer, change)


def _trained(sequence: packing.Sequence, sampled: np.ndarray) -> packing.Sequence:
    """The sequence with another mask."""
    tokens = dataclasses.replace(sequence.tokens, sampled=sampled)
    return dataclasses.replace(sequence, tokens=tokens)


def _with_context(trainer: OnlineTrainer) -> None:
    def change(sequence: packing.Sequence) -> packing.Sequence:
        mask = sequence.loss_mask
        # The last tokens before an answer: a tool's output, or the end of a prompt.
        before = np.zeros_like(mask)
        before[1:-1] = ~mask[1:-1] & mask[2:]
        return _trained(sequence, mask | before)

    _sequences(trainer, change)


def _without_stops(trainer: OnlineTrainer) -> None:
    def change(sequence: packing.Sequence) -> packing.Sequence:
        mask = sequence.loss_mask
        last = mask & ~np.append(mask[1:], False)
        return _trained(sequence, mask & ~last)

    _sequences(trainer, change)


def _retokenized(trainer: OnlineTrainer) -> None:
    size = trainer.updater.model.config.vocab_size

    def change(sequence: packing.Sequence) -> packing.Sequence:
        tokens: Tokens = sequence.tokens
        # Another tokenizer has another id for every eighth token.
        drifted = tokens.sampled & (tokens.ids % 8 == tokens.ids[-1] % 8)
        ids = np.where(drifted, (tokens.ids + 1) % size, tokens.ids).astype(np.int32)
        return dataclasses.replace(
            sequence, tokens=dataclasses.replace(tokens, ids=ids)
        )

    _sequences(trainer, change)


def _following_reference(trainer: OnlineTrainer) -> None:
    updater: Any = trainer.updater
    minibatches = updater._minibatches

    def follow(*arguments: Any) -> Any:
        # The reference is the policy that is about to be trained.
        updater.reference.params = jax.tree.map(jnp.copy, updater.state.params)
        return minibatches(*arguments)

    updater._minibatches = follow


TRAPS = {
    "log-prob-mismatch": Trap(
        "the sampler has parameters that are 5 % larger than the trainer's",
        _mismatch,
        ("mismatch", "mismatch-kl"),
    ),
    "stale-rollouts": Trap(
        "the sampler keeps the first parameters, and says so",
        lambda trainer: _stale(trainer, told=True),
        ("unexpected-staleness", "stale-rollouts"),
    ),
    "stale-weights": Trap(
        "the sampler keeps the first parameters, and calls them the newest",
        lambda trainer: _stale(trainer, told=False),
        ("stale-weights",),
    ),
    "advantage-off-by-one": Trap(
        "the advantages of a sequence are shifted by one token",
        _shifted,
        ("advantage-misplaced",),
    ),
    "tool-output-in-the-loss": Trap(
        "the last token before each answer is trained on",
        _with_context,
        ("tool-output-trained",),
    ),
    "asymmetric-stop-tokens": Trap(
        "the token that ends an answer is sampled and not trained on",
        _without_stops,
        ("stop-token-untrained",),
    ),
    "tokenizer-drift": Trap(
        "some trained ids are those of another tokenizer",
        _retokenized,
        ("retokenized",),
    ),
    "reference-drift": Trap(
        "the reference is replaced by the policy at every step",
        _following_reference,
        ("reference-changed", "reference-still"),
        reference=True,
    ),
}
