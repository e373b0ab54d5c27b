"""Sizes of the sampler, and the padded lengths for which its programs are compiled."""

import bisect
from dataclasses import dataclass
from functools import cached_property

__all__ = ["EngineConfig"]

SMALLEST_BUCKET = 16


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the sampler; each determines shapes, so a change needs recompilation.

    Attributes:
        num_slots: number of samples that decode at the same time.
        max_prompt_tokens: maximum length of a prompt.
        max_tokens: maximum number of tokens that a request may sample.
        steps_per_call: decoding steps per burst; the host sees tokens only in between.
        prefill_tokens: prompt tokens per prefill call, padding included.
        max_stop_ids: maximum number of stop ids of a request.
    """

    num_slots: int = 64
    max_prompt_tokens: int = 256
    max_tokens: int = 256
    steps_per_call: int = 16
    prefill_tokens: int = 1024
    max_stop_ids: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(
                    f"EngineConfig: {name} must be at least 1; got {value}"
                )

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a slot, prompt and completion."""
        return self.max_prompt_tokens + self.max_tokens

    @cached_property
    def prompt_buckets(self) -> tuple[int, ...]:
        """Padded lengths of prompts, ascending."""
        # A request that continues a cancelled sample has a longer prompt.
        longer = [
            size for size in _buckets(self.max_length) if size > self.max_prompt_tokens
        ]
        return (*_buckets(self.max_prompt_tokens), *longer)

    @cached_property
    def view_buckets(self) -> tuple[int, ...]:
        """Numbers of cache entries that a burst may read, ascending."""
        # Decoding copies the prefix of the cache that it reads; the copy is worth its
        # memory only if it is at most half of the cache.
        half = [
            size for size in _buckets(self.max_length) if 2 * size <= self.max_length
        ]
        return (*half, self.max_length)

    def prompt_length(self, longest: int) -> int:
        """Padded length of prompts of up to `longest` tokens."""
        return _bucket(self.prompt_buckets, longest)

    def view_length(self, longest: int) -> int:
        """Cache entries that a burst reads whose longest slot has `longest` tokens.

        Args:
            longest: tokens of the slot before the burst, prompt and completion.

        >>> sizes = EngineConfig(max_prompt_tokens=64, max_tokens=192, steps_per_call=8)
        >>> sizes.view_length(64), sizes.view_length(122)
        (128, 256)
        """
        return _bucket(self.view_buckets, longest + self.steps_per_call - 1)

    def prefill_rows(self, length: int, prompts: int) -> int:
        """Rows of the next prefill call: `many`, or an eighth of it for few prompts.

        Args:
            length: padded length of the prompts.
            prompts: number of prompts of this length that wait.
        """
        many = max(1, min(self.prefill_tokens // length, self.num_slots))
        return many if 2 * prompts > many else -(-many // 8)


def _buckets(largest: int) -> tuple[int, ...]:
    """Padded lengths: powers of two from SMALLEST_BUCKET, then `largest` itself."""
    sizes, size = [], SMALLEST_BUCKET
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)


def _bucket(buckets: tuple[int, ...], length: int) -> int:
    return buckets[min(bisect.bisect_left(buckets, length), len(buckets) - 1)]
