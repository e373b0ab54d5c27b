"""The trainer's answers to the probe of samplers that have their own parameters."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.data import packing
from jaxrl_post.fleet.probe import ProbeAnswers, ProbeRows, latest
from jaxrl_post.learner.updater import Updater
from jaxrl_post.types import PyTree

__all__ = ["Answering", "probe_rows"]


def probe_rows(config: RLConfig, vocab: int) -> ProbeRows:
    """The rows of a run's probe.

    Args:
        config: with the measured length of prompts.
        vocab: number of token ids.
    """
    rollout = config.rollout
    return ProbeRows.make(
        vocab, rollout.max_prompt_tokens, rollout.max_tokens, rollout.temperature
    )


@dataclass
class Answering:
    """Scores the rows of the probe by the trainer's own programs, version by version.

    Attributes:
        updater: has the scorer and the options.
        rows: of the probe.
    """

    updater: Updater
    rows: ProbeRows
    # Answers of the first version and of the last one.
    _before: list[np.ndarray] = field(default_factory=list, init=False)

    def answers(self, params: PyTree) -> ProbeAnswers:
        """Returns the log-probs under the trained parameters and under earlier ones."""
        found = self._scored(self.updater.model.whole(params))
        answers = ProbeAnswers(found, latest(self._before), self.updater.config.exact)
        self._before = [*self._before[:1], found]
        return answers

    def _scored(self, whole: Any) -> np.ndarray:
        """The log-probs of the decoded tokens, float32 [rows, decoded]."""
        rows = self.rows
        count, places = rows.decoded.shape
        # Each token's log-prob is its number, which tells where packing has put it.
        numbers = np.arange(count * places, dtype=np.float32).reshape(count, places)
        sequences = [
            packing.Sequence.of(
                row[: rows.prompt], row[rows.prompt :], behavior_logprobs=number
            )
            for row, number in zip(rows.ids.tolist(), numbers.tolist(), strict=True)
        ]
        scorer = self.updater.learner.scorer
        size = self.updater.config.update.microbatch_tokens
        batch = packing.pack_microbatches(sequences, size, scorer.microbatch_rows)
        found, mask = scorer.predict(whole, batch).logprobs, np.asarray(batch.loss_mask)
        order = np.asarray(batch.behavior_logprobs)[mask].astype(np.int32)
        answers = np.empty(count * places, np.float32)
        answers[order] = np.asarray(found)[mask]
        return answers.reshape(count, places)
