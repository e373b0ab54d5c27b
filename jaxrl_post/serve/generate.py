"""`POST /inference/v1/generate`: token ids in, token ids out, `/tokenize` and back."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxrl_post.data import chat
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.serve import answers, scored
from jaxrl_post.serve.calls import ApiError, SampleUpdate, Served, Wanted
from jaxrl_post.serve.fields import DetokenizeFields, GenerateFields, TokenizeFields
from jaxrl_post.serve.prompts import prompt_of, tools_of
from jaxrl_post.serve.recorded import Recorder
from jaxrl_post.tokens import Tokens

__all__ = ["detokenize", "generate", "spans", "tokenize"]

# Token ids that are written at a time.
PART = 2**14


async def generate(
    http: HttpRequest,
    served: Served,
    fields: GenerateFields,
    recorder: Recorder | None = None,
) -> Response:
    """Samples after token ids; the answer says which version sampled each token.

    Args:
        http: the request.
        served: the model.
        fields: of the request.
        recorder: of the episode to which the call belongs; None for none.

    Raises:
        ApiError: names what is wrong with the request.
    """
    served.check_model(fields.model)
    given, prompt = fields.sampling_params, tuple(fields.token_ids)
    asked = None if given.max_tokens is None else max(1, given.max_tokens)
    most = served.length_of(prompt, asked)
    constrain = await served.constraint(given.structured_outputs, "structured_outputs")
    sampling = answers.sampling_of(
        served,
        given,
        max_tokens=most,
        alternatives=bool(given.logprobs),
        prompt_scores=given.prompt_logprobs is not None,
    )
    wanted = Wanted(prompt, sampling, given.n, seed=given.seed, constrain=constrain)
    scored.check_size([wanted], given.prompt_logprobs)
    recorded = None
    if recorder is not None:
        recorder.refuse_scores(given.prompt_logprobs is not None)
        recorded, wanted = recorder.begin(served, wanted)
    return await _Asked(served, fields, [wanted], recorded).answer(http)


class _Asked(answers.Asked):
    """A request, read."""

    def head(self, *, stream: bool) -> dict[str, Any]:
        """The first fields of the answer."""
        del stream
        request_id = self.fields.request_id or uuid.uuid4().hex
        return {"request_id": request_id, "model": self.served.name}

    def choice(self, update: SampleUpdate) -> dict[str, Any]:
        """A finished sample as a choice of the answer."""
        tokens, count = update.tokens, self.fields.sampling_params.logprobs
        choice: dict[str, Any] = {
            "index": update.sample_index,
            "token_ids": tokens.ids.tolist(),
            "finish_reason": answers.reason_of(update.finish_reason),
            "weight_versions": spans(tokens),
            "logprobs": None,
        }
        if count is None:
            return choice

        def entry(token: int, logprob: float) -> dict[str, Any]:
            # Clients read either.
            name = f"token_id:{token}"
            return {"token": name, "token_id": token, "logprob": logprob}

        choice["logprobs"] = {
            "content": answers.with_likeliest(
                self.served, update, 0, count, entry, constrained=self.constrained
            )
        }
        return choice


def spans(tokens: Tokens) -> list[dict[str, Any]]:
    """Half-open spans of tokens that one version sampled.

    >>> spans(Tokens.generated([5, 6], [-1, -1], version=3))
    [{'version': '3', 'start': 0, 'end': 2}]
    """
    if not len(tokens):
        return []
    cuts = np.flatnonzero(np.diff(tokens.versions)) + 1
    begins = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(tokens)]
    return [
        {"version": str(int(tokens.versions[begin])), "start": begin, "end": end}
        for begin, end in zip(begins, ends, strict=True)
    ]


async def tokenize(
    http: HttpRequest, served: Served, fields: TokenizeFields
) -> Response:
    """Token ids of a text, or of a conversation as a chat would have them.

    Raises:
        ApiError: names what is wrong with the request.
    """
    del http
    served.check_model(fields.model)
    try:
        if fields.messages is None:
            ids = await asyncio.to_thread(
                served.tokenizer.encode,
                fields.prompt or "",
                special=fields.add_special_tokens,
            )
        else:
            options = chat.Options(
                tools=await asyncio.to_thread(tools_of, fields.tools),
                variables=fields.chat_template_kwargs or {},
                adapt=True,
            )
            ids = await asyncio.to_thread(
                prompt_of,
                served.tokenizer,
                fields.messages,
                options,
                continue_final=fields.continue_final_message,
                prompt=fields.add_generation_prompt,
                most=served.max_model_len,
            )
            ids = await asyncio.to_thread(served.vocabulary, ids)
    except (TokenizerError, ValueError) as error:
        raise ApiError(400, str(error)) from error
    tokens = await asyncio.to_thread(_listed, ids)
    head = f'{{"count":{len(ids)},"max_model_len":{served.max_model_len}'
    return Response(f'{head},"tokens":{tokens}}}', media_type="application/json")


def _listed(ids: Sequence[int]) -> str:
    """Token ids as JSON, written in parts, between which other threads have a turn."""
    parts = (ids[first : first + PART] for first in range(0, len(ids), PART))
    return f"[{','.join(','.join(map(str, part)) for part in parts)}]"


async def detokenize(
    http: HttpRequest, served: Served, fields: DetokenizeFields
) -> Response:
    """The text of token ids, with special tokens.

    Raises:
        ApiError: another model is asked for, or there is no such token.
    """
    del http
    served.check_model(fields.model)
    text = await asyncio.to_thread(_text, served.tokenizer, fields.tokens)
    return JSONResponse({"prompt": text})


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of token ids, with special tokens.

    Raises:
        ApiError: there is no such token.
    """
    vocab = tokenizer.num_embeddings or tokenizer.vocab_size
    largest = max(tokens, default=0)
    if largest >= vocab:
        raise ApiError(
            400,
            f"tokens: token ids must lie in 0..{vocab - 1}; got {largest}",
            param="tokens",
        )
    return tokenizer.decoded(tokens, special=True)
