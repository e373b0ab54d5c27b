"""Supervised fine-tuning on demonstrations, over the same learner."""

from collections.abc import Callable, Iterator

import grain
import numpy as np

from jaxrl_post.algorithms import Objective
from jaxrl_post.data import chat, packing
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Environment
from jaxrl_post.losses import reduce, supervised
from jaxrl_post.train.config import ConfigError
from jaxrl_post.train.learner import Learner
from jaxrl_post.train.state import TrainState
from jaxrl_post.types import Array, Float, TokenBatch

__all__ = ["batches", "next_token_objective", "train"]


def next_token_objective(
    policy_logprobs: Float[Array, "rows length"], batch: TokenBatch
) -> Objective:
    """Mean negative log-likelihood of the tokens that the mask marks, in nats."""
    losses = supervised.next_token_loss(policy_logprobs, batch.loss_mask)
    loss = reduce.token_mean(losses, batch.loss_mask, batch.segment_ids)
    return Objective(loss, {})


def batches(
    environment: Environment,
    tokenizer: Tokenizer,
    indices: grain.DatasetIterator,
    *,
    examples: int,
    row_tokens: int,
    row_multiple: int,
) -> Iterator[TokenBatch]:
    """Packs prompts with their demonstrations, for ever.

    Args:
        environment: gives both.
        tokenizer: of the model; its end-of-sequence id ends a demonstration.
        indices: iterator over training tasks.
        examples: demonstrations of a batch.
        row_tokens: length of a row.
        row_multiple: the batch's rows are a multiple of this.

    Raises:
        ConfigError: a task without a demonstration, or one that is too long.
    """
    tasks = environment.tasks("train")
    while True:
        sequences = []
        for _ in range(examples):
            task = tasks[int(next(indices))]
            answer = environment.demonstration(task)
            if answer is None:
                raise ConfigError(
                    f"--env: {environment.name} has no demonstration of task "
                    f"{task.id}; supervised fine-tuning needs one for every task"
                )
            prompt = chat.render(tokenizer, task.messages)
            target = (*tokenizer.encode(answer), tokenizer.eos_id)
            if len(prompt) + len(target) > row_tokens:
                raise ConfigError(
                    f"--max-tokens: task {task.id} of {environment.name} with its "
                    f"demonstration has {len(prompt) + len(target)} tokens, more than "
                    f"{row_tokens}; raise the option"
                )
            sequences.append(packing.Sequence.of(prompt, target))
        yield packing.pack(sequences, row_tokens, row_multiple)


def train(
    learner: Learner,
    state: TrainState,
    data: Iterator[TokenBatch],
    *,
    first: int,
    last: int,
    on_step: Callable[[int, TrainState, dict[str, float]], bool],
) -> TrainState:
    """Takes optimizer steps `first` to `last`.

    Args:
        learner: with `next_token_objective`.
        state: donated.
        data: from `batches`.
        first: number of the first step, from 1.
        last: number of the last step.
        on_step: called after each step with its number, the state and the metrics; a
            True ends the training.
    """
    for number in range(first, last + 1):
        batch = next(data)
        state, metrics = learner.update(state, batch, where=f"step {number}")
        metrics["train/tokens"] = float(np.sum(batch.loss_mask))
        if on_step(number, state, metrics):
            break
    return state
