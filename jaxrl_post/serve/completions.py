"""`POST /v1/completions`: a text, or token ids, is continued."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxrl_post.data.tokenizer import TokenizerError
from jaxrl_post.serve import answers, scored
from jaxrl_post.serve.calls import ApiError, SampleUpdate, Served, Wanted, logprobs_of
from jaxrl_post.serve.fields import CompletionFields
from jaxrl_post.serve.recorded import Recorder
from jaxrl_post.serve.texts import Texts

__all__ = ["answer"]

# OpenAI's default.
MAX_TOKENS = 16
MOST_PROMPTS = 128


@dataclass(frozen=True)
class _Told:
    """State of a stream's choice: what it has sent.

    Attributes:
        text: of the choice.
        tokens: number of its tokens.
        offset: letters of their texts; also special tokens have one.
    """

    text: str = ""
    tokens: int = 0
    offset: int = 0

    def followed_by(self, served: Served, text: str, ids: Sequence[int]) -> "_Told":
        """The state after a further piece.

        Args:
            served: the model.
            text: of the choice, from its beginning.
            ids: all of its tokens.
        """
        new = [scored.token_text(served, token) for token in ids[self.tokens :]]
        return _Told(text, len(ids), self.offset + sum(map(len, new)))


@dataclass(frozen=True)
class _Asked(answers.Asked):
    """A request, read."""

    texts: Texts

    kinds = ("cmpl", "text_completion", "text_completion")

    @classmethod
    async def of(
        cls, served: Served, fields: CompletionFields, recorder: Recorder | None
    ) -> "_Asked":
        """Reads and checks a request; slow work runs in a thread.

        Raises:
            ApiError: names what is wrong with it.
        """
        if recorder is not None:
            _check_ids(fields)
            recorder.refuse_scores(fields.echo or fields.scores)
        prompts = await asyncio.to_thread(_prompts, served, fields)
        _refuse_pictures(served, prompts)
        default = min(MAX_TOKENS, served.max_tokens)
        # The sampler samples a token at least; `shown` leaves it out if none is wanted.
        asked = None if fields.max_tokens is None else max(1, fields.max_tokens)
        lengths = [served.length_of(prompt, asked, default) for prompt in prompts]
        constrain = await answers.constraint_of(served, fields)
        sampling = answers.sampling_of(
            served,
            fields,
            max_tokens=default,
            alternatives=bool(fields.logprobs),
            prompt_scores=fields.scores,
        )
        # Samples of all prompts are numbered through, so that with a seed no two of
        # them share their noise.
        wanted = [
            Wanted(
                prompt,
                replace(sampling, max_tokens=most),
                fields.n,
                at * fields.n,
                fields.seed,
                constrain,
            )
            for at, (prompt, most) in enumerate(zip(prompts, lengths, strict=True))
        ]
        if fields.scores:
            count = max(fields.logprobs or 0, fields.prompt_logprobs or 0)
            scored.check_size(wanted, count)
        recorded = None
        if recorder is not None:
            recorded, first = recorder.begin(served, wanted[0])
            wanted, sampling = [first], first.sampling
        special = not fields.skip_special_tokens
        texts = Texts(
            served.tokenizer,
            sampling.stop_strings,
            special,
            least=sampling.min_tokens,
        )
        return cls(served, fields, wanted, recorded, texts)

    def extras(
        self,
        choices: Sequence[dict[str, Any]],
        updates: Sequence[SampleUpdate] = (),
    ) -> dict[str, Any]:
        """The token ids of the first prompt; each choice of an answer has its own."""
        del updates
        if not (choices and self.fields.return_token_ids):
            return {}
        prompts = [list(each.prompt) for each in self.wanted]
        for choice in choices:
            choice["prompt_token_ids"] = prompts[choice["index"] // self.fields.n]
        return {"prompt_token_ids": prompts[0]}

    def choice(self, update: SampleUpdate) -> dict[str, Any]:
        """A finished sample as a choice of the answer."""
        return self._choice(update, self.text(update))

    def text(self, update: SampleUpdate) -> str:
        """The text of a sample; with `echo` its prompt's text comes first."""
        text = self.texts.text(update.tokens.ids.tolist(), update.finish_reason)
        if not self.fields.echo:
            return text
        number = update.sample_index // self.fields.n
        given: Any = self.fields.prompt
        if isinstance(given, str):
            return given + text
        if isinstance(given[number], str):
            return given[number] + text
        prompt = self.wanted[number].prompt
        shown = not self.fields.skip_special_tokens
        return self.served.tokenizer.decoded(prompt, special=shown) + text

    def pieces(self) -> Callable[[SampleUpdate], dict[str, Any] | None]:
        """A function that tells a stream what is new in a choice."""
        told: dict[int, _Told] = {}

        def piece(update: SampleUpdate) -> dict[str, Any] | None:
            before, text = told.get(update.sample_index, _Told()), self.text(update)
            finished = update.finish_reason is not None
            if len(text) == len(before.text) and not finished:
                return None
            new = text[len(before.text) :]
            choice = self._choice(update, new, before.tokens, before.offset)
            if finished:
                self.record(choice, update, None)
            ids = update.tokens.ids.tolist()
            told[update.sample_index] = before.followed_by(self.served, text, ids)
            return choice

        return piece

    def _choice(
        self, update: SampleUpdate, text: str, first: int = 0, offset: int = 0
    ) -> dict[str, Any]:
        """A choice, or what is new in it.

        Args:
            update: the newest of the sample.
            text: what is new.
            first: the first token that is new.
            offset: where its text begins in the texts of all tokens.
        """
        choice: dict[str, Any] = {
            # Indices of a later prompt follow.
            "index": update.sample_index,
            "text": text,
            "finish_reason": answers.reason_of(update.finish_reason),
            "logprobs": self._logprobs(update, first, offset),
        }
        prompt = self.wanted[update.sample_index // self.fields.n].prompt
        if (count := self.fields.prompt_logprobs) is not None:
            assert update.prompt is not None
            told = scored.by_id(self.served, prompt, update.prompt, count)
            choice["prompt_logprobs"] = told
        if self.fields.return_token_ids:
            choice["token_ids"] = update.tokens.ids[first:].tolist()
        return choice

    def _logprobs(
        self, update: SampleUpdate, first: int, offset: int
    ) -> dict[str, Any] | None:
        count = self.fields.logprobs
        if count is None:
            return None
        served, constrained = self.served, self.constrained
        ids = update.tokens.ids[first:].tolist()
        texts = [scored.token_text(served, token) for token in ids]
        tops: list[Any] = [
            *answers.likeliest(served, update, first, count, constrained=constrained)
        ]
        values: list[Any] = logprobs_of(update.tokens, constrained=constrained).tolist()
        values = values[first:]
        if self.fields.echo:
            assert update.prompt is not None
            prompt = self.wanted[update.sample_index // self.fields.n].prompt
            own, others = scored.by_place(prompt, update.prompt, count)
            texts = [*(scored.token_text(served, t) for t in prompt), *texts]
            values, tops = [*own, *values], [*others, *tops]
        offsets = accumulate(map(len, texts[:-1]), initial=offset)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": [_by_text(served, top) for top in tops] if count else None,
            "text_offset": list(offsets)[: len(texts)],
        }


def _by_text(
    served: Served, top: Mapping[int, float] | None
) -> dict[str, float] | None:
    """Log-probs by the text of a token, the likeliest first; None of no log-probs.

    Of several tokens with one text, such as parts of characters, the others are named
    by their ids, as vLLM names them.
    """
    if top is None:
        return None
    found: dict[str, float] = {}
    for token, value in top.items():
        text = scored.token_text(served, token)
        found[f"token_id:{token}" if text in found else text] = value
    return found


async def answer(
    http: HttpRequest,
    served: Served,
    fields: CompletionFields,
    recorder: Recorder | None = None,
) -> Response:
    """Continues one text or several; in an episode the token ids of one.

    Args:
        http: the request.
        served: the model.
        fields: of the request.
        recorder: of the episode to which the call belongs; None for none.

    Raises:
        ApiError: names what is wrong with the request.
    """
    served.check_model(fields.model)
    return await (await _Asked.of(served, fields, recorder)).answer(http)


def _check_ids(fields: CompletionFields) -> None:
    """Raises ApiError unless the prompt is the token ids of one conversation.

    An answer that came back as a text would be tokenised again, and its tokens might
    differ from the served ones.
    """
    given = fields.prompt
    if not isinstance(given, list) or not given or not isinstance(given[0], int):
        raise ApiError(
            400,
            "prompt: an episode's calls have one prompt, a list of token ids, so that "
            "training uses what was served; POST /tokenize gives the ids of a text, "
            "and chats take messages",
            param="prompt",
        )


def _refuse_pictures(served: Served, prompts: Iterable[Sequence[int]]) -> None:
    """Refuses image tokens, for which there is no picture here."""
    eyes = served.tokenizer.eyes
    if eyes is None:
        return
    for prompt in prompts:
        if count := list(prompt).count(eyes.image_token):
            raise ApiError(
                400,
                f"prompt: has {count} image tokens, and completions read text alone; "
                "send pictures to /v1/chat/completions or /v1/responses",
                param="prompt",
            )


def _prompts(served: Served, fields: CompletionFields) -> list[tuple[int, ...]]:
    """The token ids of each prompt.

    Raises:
        ApiError: an empty or too long list, an empty prompt, or an unknown token.
    """
    given: Any = fields.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 0 < len(given) <= MOST_PROMPTS:
        raise ApiError(
            400,
            f"prompt: give 1 to {MOST_PROMPTS} prompts; got {len(given)}",
            param="prompt",
        )
    for each in given:
        if isinstance(each, str):
            served.check_text(each)
    try:
        prompts = [
            served.tokenizer.encode(each, special=fields.add_special_tokens)
            if isinstance(each, str)
            else tuple(each)
            for each in given
        ]
    except TokenizerError as error:
        raise ApiError(400, f"prompt: {error}", param="prompt") from error
    if not all(prompts):
        raise ApiError(
            400,
            "prompt: an empty prompt has nothing to continue; give at least a token",
            param="prompt",
        )
    return prompts
