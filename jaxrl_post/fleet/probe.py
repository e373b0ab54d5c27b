"""Whether a sampler computes the policy that the trainer published.

Each version comes with the trainer's log-probs of a few fixed rows of tokens. Before a
sampler serves the version, its own engine decodes these rows: it prefills their prompts
and is made to sample the tokens that follow. Its log-probs then show an adapter that is
missing, parts of arrays in a wrong place, other rotary embeddings, keys of another
version in the cache, or an update that never arrived.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import Request, SamplingParams

__all__ = ["Examiner", "ProbeAnswers", "ProbeError", "ProbeRows", "ask"]

# ProbeRows, and most tokens of a row's prompt and of what follows.
ROWS, MOST_PROMPT, MOST_DECODED = 4, 48, 16
# The prompt ids of the rows; training and evaluation never reach them.
IDS = 2**32 - ROWS
# Without exact log-probs: nats by which the first version may differ in the mean, times
# by which a later one may differ more than those before, and nats that never count.
FIRST, TIMES, ALWAYS = 0.25, 4.0, 1e-4
# A version is refused if another one is nearer than this share of its own distance.
NEARER = 0.5


class ProbeError(RuntimeError):
    """The sampler does not compute the policy that it was given."""


class ProbeRows(NamedTuple):
    """Fixed rows of token ids.

    Attributes:
        ids: int32 [rows, tokens].
        prompt: number of tokens of each that are a prompt; those behind it are decoded.
        temperature: of all log-probs.
    """

    ids: np.ndarray
    prompt: int
    temperature: float

    @staticmethod
    def make(
        vocab: int, most_prompt: int, most_tokens: int, temperature: float
    ) -> "ProbeRows":
        """Draws rows that fit a sampler; always the same ones.

        Args:
            vocab: number of token ids.
            most_prompt: most tokens of a prompt.
            most_tokens: most tokens of a completion.
            temperature: of the log-probs.

        >>> ProbeRows.make(100, 8, 4, 1.0).ids.shape
        (4, 12)
        """
        prompt = min(most_prompt, MOST_PROMPT)
        shape = ROWS, prompt + min(most_tokens, MOST_DECODED)
        ids = np.random.default_rng(0).integers(0, vocab, shape, np.int32)
        return ProbeRows(ids, prompt, temperature)

    @property
    def decoded(self) -> np.ndarray:
        """int32 [rows, tokens - prompt], the tokens whose log-probs are compared."""
        return self.ids[:, self.prompt :]

    def to_json(self) -> dict[str, Any]:
        """A JSON value for `from_json`."""
        return {
            "ids": self.ids.tolist(),
            "prompt": self.prompt,
            "temperature": self.temperature,
        }

    @staticmethod
    def from_json(value: Any) -> "ProbeRows":
        """Restores what `to_json` made."""
        ids = np.array(value["ids"], np.int32)
        return ProbeRows(ids, int(value["prompt"]), float(value["temperature"]))


class ProbeAnswers(NamedTuple):
    """The trainer's log-probs of the decoded tokens, float32 [rows, decoded].

    Attributes:
        own: under the version that is published.
        others: under earlier versions, with which it must not be confused.
        exact: whether the sampler's must equal them to the last bit.
    """

    own: np.ndarray
    others: tuple[np.ndarray, ...]
    exact: bool

    def to_json(self) -> dict[str, Any]:
        """A JSON value for `from_json`."""
        return {
            "own": self.own.tolist(),
            "others": [each.tolist() for each in self.others],
            "exact": self.exact,
        }

    @staticmethod
    def from_json(value: Any) -> "ProbeAnswers":
        """Restores what `to_json` made."""

        def read(part: Any) -> np.ndarray:
            return np.array(part, np.float32)

        others = tuple(map(read, value["others"]))
        return ProbeAnswers(read(value["own"]), others, bool(value["exact"]))


class _Forced:
    """A constraint that allows one token at each place."""

    def __init__(self, tokens: Iterable[int], vocab: int) -> None:
        self._left, self._words = list(tokens), -(-vocab // 32)

    def allowed(self) -> np.ndarray:
        words = np.zeros(self._words, np.uint32)
        # Behind the last token the request ends.
        token = self._left[0] if self._left else 0
        words[token // 32] = np.uint32(1 << token % 32)
        return words

    def advance(self, token: int) -> None:
        assert token == self._left.pop(0), "it was the only one allowed"


def ask(sampler: Sampler, rows: ProbeRows, vocab: int) -> np.ndarray:
    """Returns the sampler's log-probs of the decoded tokens, float32 [rows, decoded].

    Args:
        sampler: with the version bound; nothing else runs in it.
        rows: to decode.
        vocab: number of token ids.

    Raises:
        ProbeError: its log-probs are not finite.
    """
    sampling = SamplingParams(
        temperature=rows.temperature, max_tokens=rows.decoded.shape[1]
    )
    for number, row in enumerate(rows.ids.tolist()):
        prompt, forced = tuple(row[: rows.prompt]), row[rows.prompt :]
        sampler.submit(
            Request(
                IDS + number,
                prompt,
                sampling=sampling,
                constrain=lambda tokens=tuple(forced): _Forced(tokens, vocab),
            )
        )
    found = dict[int, np.ndarray]()
    while sampler.busy:
        sampler.dispatch()
        for each in sampler.collect():
            if each.finish_reason == "failed":
                raise ProbeError(f"probe: {each.error}")
            found[each.prompt_id] = each.tokens.logprobs
    return np.stack([found[IDS + number] for number in range(len(rows.ids))])


@dataclass
class Examiner:
    """Compares a sampler's log-probs with the trainer's, version by version.

    Attributes:
        usual: largest mean difference of a version that was accepted, in nats; None
            before the first.
    """

    usual: float | None = field(default=None, init=False)

    def examine(self, found: np.ndarray, answers: ProbeAnswers) -> float:
        """Returns the mean absolute difference in nats, if it is none of concern.

        Args:
            found: by `ask`.
            answers: the trainer's.

        Raises:
            ProbeError: the sampler computes something else.
        """
        apart = np.abs(found - answers.own)
        mean = float(apart.mean())
        if answers.exact:
            if found.tobytes() != answers.own.tobytes():
                row, place = np.argwhere(found != answers.own)[0]
                raise ProbeError(
                    f"probe: {np.count_nonzero(found != answers.own)} of {found.size} "
                    f"log-probs differ from the trainer's, the first in row {row} at "
                    f"decoded token {place}: {found[row, place]:.9g} instead of "
                    f"{answers.own[row, place]:.9g}; with --exact none may"
                )
            return mean
        bound = FIRST if self.usual is None else max(TIMES * self.usual, ALWAYS)
        if not mean <= bound:
            raise ProbeError(
                f"probe: the log-probs differ from the trainer's by {mean:.3g} nats in "
                f"the mean; at most {bound:.3g} were expected"
            )
        for other in answers.others:
            near = float(np.abs(found - other).mean())
            if near < NEARER * mean and mean > ALWAYS:
                raise ProbeError(
                    f"probe: the log-probs are {near:.3g} nats from an earlier "
                    f"version's and {mean:.3g} from this one's: the update has not "
                    "arrived"
                )
        self.usual = max(mean, self.usual or 0.0)
        return mean


def latest(answers: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The first and the last of earlier answers, which most often stay behind."""
    return tuple(answers[:1]) + tuple(answers[-1:] if len(answers) > 1 else ())
