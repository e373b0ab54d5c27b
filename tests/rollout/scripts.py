"""A sampler that reads its completions from a script, and text as characters."""

from collections.abc import Callable, Sequence

from jaxrl_post.envs import Message
from jaxrl_post.sampler.requests import Completion, Request

STOP = 0


class Characters:
    """One token a character. Text does not lead back to the tokens it came from."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(c) for message in messages for c in message.content)

    def reply(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        *,
        stop_id: int | None,
    ) -> tuple[int, ...]:
        del stop_id
        assert before[-1].role == "assistant"
        return self.render(messages)

    def decode(self, tokens: Sequence[int]) -> str:
        # Samples are in capitals, their text is not.
        return "".join(map(chr, tokens)).lower()


class ScriptedSampler:
    """Completes request after request, `burst` samples a step.

    Args:
        script: from a request and a sample index to the text of the completion.
        burst: samples that finish in a step; 0 for a sampler that hangs.
    """

    def __init__(self, script: Callable[[Request, int], str], burst: int = 3) -> None:
        self.requests: list[Request] = []
        self._script, self._burst = script, burst
        self._waiting: list[tuple[Request, int]] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        first = request.first_sample
        self._waiting += [(request, first + i) for i in range(request.num_samples)]

    def step(self) -> list[Completion]:
        # The last in, first out: episodes do not finish in the order of their start.
        taken = [
            self._waiting.pop() for _ in range(min(self._burst, len(self._waiting)))
        ]
        return [self._complete(request, index) for request, index in taken]

    def _complete(self, request: Request, index: int) -> Completion:
        text = self._script(request, index).upper()
        tokens = (*map(ord, text), STOP)
        logprobs = tuple(-index - token / 1000 for token in tokens)
        size = len(tokens)
        return Completion(
            request.prompt_id,
            index,
            tokens,
            logprobs,
            (-0.5,) * size,
            (7,) * size,
            "stop",
        )
