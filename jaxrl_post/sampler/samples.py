"""A sample of a request, as the scheduler moves it along; runs on the host."""

from dataclasses import dataclass, field

from jaxrl_post.sampler.limits import Changes, changes_of, constraint_of
from jaxrl_post.sampler.prefixes import Path, Segment
from jaxrl_post.sampler.requests import (
    Alternatives,
    Completion,
    Constraint,
    FinishReason,
    Request,
    SampleId,
    Unfinished,
)
from jaxrl_post.sampler.scores import PromptScoring
from jaxrl_post.sampler.snapshots import Snapshot
from jaxrl_post.tokens import Tokens

__all__ = ["Sample"]


@dataclass(eq=False)
class Sample:
    """A waiting or running sample and its tokens so far.

    Attributes:
        request: what was asked for.
        sample_index: its index among the samples of the prompt.
        tokens: the tokens sampled so far.
        part: the part of the mesh where it runs.
        path: its context in the cache.
        own: the segment of what it samples; None while it waits.
        constraint: which token may come next; None for any.
        alternatives: of the tokens so far; None if not asked for.
        scoring: the scores of its prompt; None if it has none to compute.
        source: the state from which its first burst begins, of a model with states;
            None for zeros, and after that burst.
        began: whether its first burst was given, of a model with states.
    """

    request: Request
    sample_index: int
    tokens: Tokens = field(default_factory=lambda: Tokens.context(()))
    part: int = 0
    path: Path = ()
    own: Segment | None = None
    constraint: Constraint | None = None
    alternatives: Alternatives | None = None
    scoring: PromptScoring | None = None
    source: Snapshot | None = None
    began: bool = False

    @classmethod
    def of(cls, request: Request, sample_index: int, vocab_size: int) -> "Sample":
        """A waiting sample of a request.

        Raises:
            ValueError: its limits allow no first token.
        """
        sample = cls(request, sample_index)
        if request.sampling.alternatives:
            sample.alternatives = Alternatives.none()
        sample.constraint = constraint_of(request, vocab_size)
        if sample.constraint is not None:
            before = len(request.prompt) - request.num_sampled
            for token in request.prompt[before:]:
                sample.constraint.advance(token)
        return sample

    @property
    def id(self) -> SampleId:
        """Prompt id and sample index."""
        return self.request.prompt_id, self.sample_index

    @property
    def remaining(self) -> int:
        """Maximum number of tokens still to sample."""
        return self.request.sampling.max_tokens - len(self.tokens)

    @property
    def last(self) -> int:
        """The token to feed next."""
        return int(self.tokens.ids[-1]) if len(self.tokens) else self.request.prompt[-1]

    @property
    def position(self) -> int:
        """Position of the token to feed next."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def scores(self) -> bool:
        """Whether the prompt is scored with this sample, the first of its request."""
        first = self.sample_index == self.request.first_sample
        return first and self.request.sampling.prompt_scores

    @property
    def single(self) -> bool:
        """Whether its next token depends on what the host makes of the last one."""
        return self.constraint is not None or self.request.sampling.penalizes

    @property
    def most_changes(self) -> int:
        """Most tokens whose logits are changed for the next one."""
        sampling = self.request.sampling
        tokens = len(self.request.prompt) + len(self.tokens)
        return len(sampling.logit_bias) + sampling.penalizes * tokens

    @property
    def changes(self) -> Changes:
        """The changes of its next token's logits."""
        request = self.request
        own = len(request.prompt) - request.num_sampled
        sampled = (*request.prompt[own:], *self.tokens.ids.tolist())
        return changes_of(request.sampling, request.prompt[:own], sampled)

    @property
    def ready(self) -> bool:
        """Whether the keys and values of its context have been computed."""
        return all(segment.computed >= count for segment, count in self.path)

    def finished(self, reason: FinishReason, error: str = "") -> Completion:
        """The completion of this sample."""
        scores = None if self.scoring is None else self.scoring.found
        return Completion(
            *self.id, self.tokens, reason, error, self.alternatives, prompt=scores
        )

    @property
    def unfinished(self) -> Unfinished:
        """The tokens sampled so far."""
        return Unfinished(*self.id, self.tokens, self.alternatives)

    def cut(self, count: int) -> None:
        """Gives up all tokens but the first `count`."""
        self.tokens = self.tokens[:count]
        if self.alternatives is not None:
            self.alternatives = self.alternatives.first(count)
