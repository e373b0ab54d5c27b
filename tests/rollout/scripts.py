"""A sampler that reads its completions from a script, and text as characters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_post.data.replies import Reply
from jaxrl_post.envs import Message
from jaxrl_post.rollout import Collector, Dialogue, EpisodeLimits
from jaxrl_post.rollout.judgements import Judges
from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished
from jaxrl_post.tokens import Tokens

STOP = 0


def collector(
    codec: Any,
    judges: Judges,
    limits: EpisodeLimits,
    *,
    deadline_s: float = 3600.0,
    grace_s: float = 0.0,
) -> Collector:
    """A collector of a dialogue."""
    return Collector(Dialogue(codec, judges, limits, grace_s), deadline_s)


class Characters:
    """One token a character. Text does not lead back to the tokens it came from."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        del tools
        return tuple(ord(c) for message in messages for c in message.content)

    def reply(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        stop_id: int | None,
    ) -> tuple[int, ...]:
        del stop_id, tools
        assert before[-1].role == "assistant"
        return self.render(messages)

    def decode(self, tokens: Sequence[int]) -> str:
        # Samples are in capitals, their text is not.
        return "".join(map(chr, tokens)).lower()

    def read(
        self,
        prompt: Sequence[int],
        said: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        del prompt, tools
        return Reply(self.decode(said))


class ScriptedSampler:
    """Completes request after request, `burst` samples a burst.

    Args:
        script: from a request and a sample index to the text of the completion.
        burst: samples that finish in a burst; 0 for a sampler that hangs.
        pieces: bursts that a sample takes; in each it gets an equal share of its text.
    """

    def __init__(
        self,
        script: Callable[[Request, int], str],
        burst: int = 3,
        *,
        pieces: int = 1,
        version: int = 7,
    ) -> None:
        self.requests: list[Request] = []
        self.version = version
        self._script, self._burst, self._pieces = script, burst, pieces
        # Each with the bursts that it has had.
        self._waiting: list[tuple[Request, int, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def check(self, request: Request) -> None:
        pass

    def unfinished(self) -> list[Unfinished]:
        return []

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        first = request.first_sample
        self._waiting += [(request, first + i, 0) for i in range(request.num_samples)]

    def dispatch(self) -> None:
        pass

    def collect(self) -> list[Completion]:
        # The last in, first out: episodes do not finish in the order of their start.
        count = min(self._burst, len(self._waiting))
        taken = [self._waiting.pop() for _ in range(count)]
        done = []
        for request, index, bursts in reversed(taken):
            tokens = self._tokens(request, index, bursts + 1)
            if tokens.ids[-1] == STOP:
                done.append(Completion(request.prompt_id, index, tokens, "stop"))
            else:
                self._waiting.append((request, index, bursts + 1))
        return done[::-1]

    def settle(self) -> list[Completion]:
        return []

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        assert samples is None
        waiting, self._waiting = self._waiting, []
        return [
            Completion(r.prompt_id, index, self._tokens(r, index, bursts), "cancelled")
            for r, index, bursts in waiting
        ]

    def _tokens(self, request: Request, index: int, bursts: int) -> Tokens:
        """Results of requests after so many bursts, with unfinished ones."""
        whole = [*map(ord, self._script(request, index).upper()), STOP]
        share = -(-len(whole) // self._pieces)
        begin = request.num_sampled
        ids = whole[begin : begin + share * bursts]
        return sampled(ids, index=index, version=self.version)


def sampled(ids: Sequence[int], *, index: int = 0, version: int = 7) -> Tokens:
    """Tokens with log-probabilities that tell them, and the samples, apart."""
    logprobs = [-index - token / 1000 for token in ids]
    return Tokens.generated(
        list(ids), logprobs, version=version, log_masses=[-0.5] * len(ids)
    )
