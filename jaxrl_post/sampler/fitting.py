"""Whether a request fits a sampler."""

from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.sampler.requests import Request
from jaxrl_post.sampler.sizes import MOST_BIASES, EngineConfig

__all__ = ["check_request"]


def check_request(
    request: Request,
    sizes: EngineConfig,
    vocab: int,
    detokenizes: bool,
    *,
    sees: bool = False,
) -> None:
    """Refuses requests that do not fit.

    Args:
        request: to sample.
        sizes: of the sampler.
        vocab: number of token ids.
        detokenizes: whether the sampler can turn ids into text.
        sees: whether the model sees pictures.

    Raises:
        ValueError: an empty or too long prompt, too many tokens or stop ids, an id
            outside the vocabulary, stop strings without a tokenizer, more
            `min_tokens` than `max_tokens`, too many biases, or what exact mode does
            not have.
    """
    sampling = request.sampling
    where = f"request {request.prompt_id}"
    own = len(request.prompt) - request.num_sampled
    if not 0 < own <= sizes.max_prompt_tokens:
        raise ValueError(
            f"{where}: a prompt must have 1 to {sizes.max_prompt_tokens} tokens; "
            f"got {own}. Raise max_prompt_tokens or drop the prompt"
        )
    if request.num_sampled + sampling.max_tokens > sizes.max_tokens:
        before = request.num_sampled
        beside = f", and {before} sampled before" if before else ""
        raise ValueError(
            f"{where}: max_tokens must be at most the engine's {sizes.max_tokens}; "
            f"got {sampling.max_tokens}{beside}"
        )
    longest = len(request.prompt) + sampling.max_tokens
    if longest > sizes.max_length:
        raise ValueError(
            f"{where}: a sample must have at most {sizes.max_length} tokens "
            f"(context_tokens); got a prompt of {len(request.prompt)} and "
            f"max_tokens {sampling.max_tokens}, which is {longest}"
        )
    if len(sampling.stop_ids) > sizes.max_stop_ids:
        raise ValueError(
            f"{where}: at most {sizes.max_stop_ids} stop ids (max_stop_ids); "
            f"got {len(sampling.stop_ids)}"
        )
    if request.num_sampled + sampling.max_tokens < sampling.min_tokens:
        raise ValueError(
            f"{where}: min_tokens must be at most max_tokens, "
            f"{sampling.max_tokens}; got {sampling.min_tokens}"
        )
    if len(sampling.logit_bias) > MOST_BIASES:
        raise ValueError(
            f"{where}: logit_bias has at most {MOST_BIASES} tokens; got "
            f"{len(sampling.logit_bias)}"
        )
    if sampling.changes and sizes.exact:
        raise ValueError(
            f"{where}: an exact engine has no logit_bias and no penalties; leave "
            "them out"
        )
    try:
        pictures = request.pictures
    except PictureError:
        # Without pictures a negative id is a wrong id.
        if sees:
            raise
        pictures = ()
    if pictures and not sees:
        raise ValueError(
            f"{where}: the prompt has pictures, and this sampler's model does not see "
            "them; load it with vision, and leave out exact"
        )
    if pictures and request.prompt[-1] < 0:
        raise ValueError(
            f"{where}: a prompt must end with a token of text, from which the first "
            "token is sampled; got one that ends with a picture"
        )
    for what, ids in (
        ("token", [t for t in request.prompt if t >= 0 or not pictures]),
        ("stop", sampling.stop_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("bad_words", [token for word in sampling.bad_words for token in word]),
    ):
        bad = [t for t in ids if not 0 <= t < vocab]
        if bad:
            raise ValueError(
                f"{where}: {what} ids must lie in 0..{vocab - 1}; got {bad[0]}. Is "
                "this the model's tokenizer?"
            )
    if sampling.prompt_scores and sizes.exact:
        raise ValueError(
            f"{where}: an exact engine does not score prompts; score them without "
            "exact, or with scoring.logprobs"
        )
    if sampling.stop_strings and not detokenizes:
        raise ValueError(f"{where}: stop_strings need an Engine with detokenize")
