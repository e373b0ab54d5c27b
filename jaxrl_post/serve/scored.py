"""Log-probs of prompts, as clients of OpenAI and of vLLM read them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.sampler.requests import PromptScores
from jaxrl_post.serve.calls import LEAST_LOGPROB, ApiError, Served, Wanted

__all__ = ["by_id", "by_place", "check_size", "token_text"]

# Log-probs in an answer, of all prompts and choices: an answer of more would take
# hundreds of megabytes.
MOST_ENTRIES = 2**18


def token_text(served: Served, token: int) -> str:
    """A token as text, special tokens too."""
    return served.tokenizer.backend.decode([token], skip_special_tokens=False)


def check_size(wanted: Sequence[Wanted], count: int | None) -> None:
    """Raises ApiError if an answer would have too many log-probs of prompts.

    Args:
        wanted: the prompts.
        count: likeliest tokens of each place that are asked for; None for no log-probs.
    """
    if count is None:
        return
    entries = sum(len(each.prompt) * each.count for each in wanted) * (count + 1)
    if entries > MOST_ENTRIES:
        raise ApiError(
            400,
            f"the answer would have {entries} log-probs of prompts, and may have "
            f"{MOST_ENTRIES}; ask for fewer prompts, choices or likeliest tokens at a "
            "time",
            param="prompt",
        )


def by_place(
    prompt: Sequence[int], scores: PromptScores, count: int
) -> tuple[list[float | None], list[dict[int, float] | None]]:
    """Log-prob of each token, and of its place's likeliest ones, the likeliest first.

    Nothing predicts the first token. The token itself is among the likeliest ones, as
    the last if it is none of them.

    Args:
        prompt: token ids.
        scores: theirs.
        count: likeliest tokens of each place.
    """
    ids, values = scores.alternatives
    own = np.maximum(scores.logprobs, LEAST_LOGPROB).tolist()
    # A small vocabulary has fewer tokens; the rest is -inf.
    count = min(count, int(np.isfinite(values).sum(axis=1).min(initial=count)))
    others = np.maximum(values[:, :count], LEAST_LOGPROB).tolist()
    tops: list[dict[int, float] | None] = [None]
    for token, value, best, theirs in zip(
        prompt[1:], own, ids[:, :count].tolist(), others, strict=True
    ):
        tops.append(dict(zip(best, theirs, strict=True)) | {token: value})
    return [None, *own], tops


def by_id(
    served: Served, prompt: Sequence[int], scores: PromptScores, count: int
) -> list[Mapping[str, Any] | None]:
    """vLLM's `prompt_logprobs`: an entry for each token, by token ids."""
    _, tops = by_place(prompt, scores, count)

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        text = token_text(served, token)
        return {"logprob": value, "rank": rank, "decoded_token": text}

    told: list[Mapping[str, Any] | None] = [None]
    for token, own, top in zip(
        prompt[1:], scores.ranks.tolist(), tops[1:], strict=True
    ):
        assert top is not None
        ranks = {each: rank for rank, each in enumerate(top, 1)} | {token: own}
        told.append({str(t): entry(t, v, ranks[t]) for t, v in top.items()})
    return told
