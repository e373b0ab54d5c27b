"""A call whose answers are recorded in an episode, of a chat or of token ids."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_post.sampler import SamplingParams
from jaxrl_post.serve.calls import ApiError, SampleUpdate, Served, Wanted
from jaxrl_post.serve.recordings import Begun, EndedError, Recording

__all__ = ["Recorded", "Recorder", "open_episode"]


@dataclass(frozen=True)
class Recorder:
    """Recorder of the answers of a call.

    Attributes:
        recording: the episode.
        player: who asks; "" in an episode without players.
    """

    recording: Recording
    player: str = ""

    def refuse_scores(self, asked: bool) -> None:
        """Raises ApiError if the prompt is asked for: an episode records answers."""
        if asked:
            raise ApiError(
                400,
                "echo, prompt_logprobs: a call of an episode answers with what it "
                "sampled; ask for the prompt outside of the episode",
                param="prompt_logprobs",
            )

    def begin(self, served: Served, wanted: Wanted) -> "tuple[Recorded, Wanted]":
        """Begins a call whose prompt is token ids; tells how it is sampled.

        Nothing is reserved or counted of a call that the sampler would refuse.

        Args:
            served: the model.
            wanted: what the request asks for.

        Raises:
            ApiError: the sampler refuses it, the episode has ended, or it would have
                more turns than it may.
        """
        sampling = sampled_as(wanted.sampling, self.recording)
        wanted = replace(wanted, sampling=sampling)
        served.check(wanted)
        with open_episode():
            begun = self.recording.begin_tokens(
                wanted.prompt, self.player, wanted.count
            )
        served.metrics.calls.labels(begun.kind).inc()
        recorded = Recorded(self.recording, begun)
        return recorded, replace(wanted, seed=recorded.seed(wanted.seed))


@dataclass(frozen=True)
class Recorded:
    """A running call whose answers are recorded.

    Attributes:
        recording: the episode.
        begun: the call.
    """

    recording: Recording
    begun: Begun

    def seed(self, asked: int | None) -> int | None:
        """The noise of the call: the episode's own, else as the request asks."""
        own = self.recording.noise(self.begun)
        # Samples of a group with the request's seed would be one and the same.
        return asked if own is None else own

    def drop(self) -> None:
        """Gives back the turns that were not answered; may be repeated."""
        self.recording.drop(self.begun)

    def add(
        self, update: SampleUpdate, answer: Mapping[str, Any] | None, reason: str | None
    ) -> int:
        """Records a finished sample; returns its number in the episode.

        Args:
            update: the sample.
            answer: the message that was served; None if none was.
            reason: why it ended, as OpenAI names it.

        Raises:
            ApiError: the episode has ended meanwhile.
        """
        assert reason is not None, "the sample has finished"
        with open_episode():
            return self.recording.add(self.begun, update.tokens, answer, reason)


def sampled_as(asked: SamplingParams, recording: Recording) -> SamplingParams:
    """Joins a request's own sampling options with the run's."""
    trained = recording.sampling
    if trained is None:
        return asked
    # Training is of the policy at the run's temperature and cuts.
    return replace(
        trained,
        max_tokens=min(asked.max_tokens, trained.max_tokens),
        stop_ids=tuple(dict.fromkeys((*trained.stop_ids, *asked.stop_ids))),
        stop_strings=(*trained.stop_strings, *asked.stop_strings),
        alternatives=asked.alternatives,
    )


@contextlib.contextmanager
def open_episode() -> Iterator[None]:
    """Turns `EndedError` into an answer.

    Raises:
        ApiError: the episode has ended.
    """
    try:
        yield
    except EndedError as error:
        raise ApiError(409, str(error), code="episode_ended") from error
