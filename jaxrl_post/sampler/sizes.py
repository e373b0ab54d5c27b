"""Sizes of the sampler, and the padded shapes for which its programs are compiled."""

import bisect
from dataclasses import dataclass
from functools import cached_property

from jaxrl_post.kernels.row_tiles import check_tile

__all__ = ["MOST_BIASES", "PAGE", "EngineConfig", "pages_for"]

# Tokens of a page of the cache. A segment of tokens begins in a page of its own.
PAGE = 16
# Most tokens of a sequence in one prefill call: its scores are held at once.
LARGEST_CHUNK = 512
# Fewer rows cost about as much: all weights are read in any case.
SMALLEST_BATCH = 8
# Pages of the smallest view: fewer shapes to compile.
SMALLEST_VIEW = 4
# Keys of so many pages fill the lanes of a TPU's vector.
WHOLE_PAGES = 8
# Most sequences that read shared keys together. More make no better matrix product.
LARGEST_GROUP = 16
# Most tokens of a request's `logit_bias`.
MOST_BIASES = 1024
# With few shapes: sequences of a group, if any have a prompt in common.
GROUP = 8


def pages_for(tokens: int) -> int:
    """Number of pages that hold so many tokens.

    >>> pages_for(0), pages_for(16), pages_for(17)
    (0, 1, 2)
    """
    return -(-tokens // PAGE)


MAY_BE_ZERO = ("context_tokens", "cache_tokens", "guesses", "kept_ids", "exact")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the sampler, and how it computes; most changes need a recompilation.

    Attributes:
        num_slots: maximum number of samples that decode at the same time.
        max_prompt_tokens: maximum length of a prompt.
        max_tokens: maximum number of tokens that a request may sample.
        context_tokens: maximum number of tokens of a sample, its prompt and what it may
            sample together; 0 for `max_prompt_tokens` + `max_tokens`.
        steps_per_call: maximum decoding steps per burst; the host sees tokens only in
            between. A burst ends earlier when so many samples have finished that a
            smaller batch serves the rest, or waiting samples can start.
        prefill_tokens: prompt tokens per prefill call, padding included.
        max_stop_ids: maximum number of stop ids of a request.
        cache_tokens: tokens whose keys and values the cache holds; a prompt counts once
            however many samples it has. Samples wait while it is full. 0 is what
            `num_slots` samples of different prompts need at most.
        guesses: tokens that a forward pass guesses for each sample, where that may pay:
            what followed the sample's last tokens before. Samples stay the same.
        guess_rows: most rows of a forward pass with guesses, samples times
            (1 + guesses): while all weights are read for few rows, more rows cost
            little.
        kept_ids: most tokens of those that top-k, top-p or min-p keep that are recorded
            for each sampled one; larger sets are not. 0 records none.
        few_shapes: whether batches are padded to few shapes, each a program to compile.
            For a server: its requests have any length and come at any time, so that in
            the end every shape comes up. A batch then has up to twice the rows that it
            needs, and up to four times the keys.
        recompute_cache: whether running samples compute their keys and values again
            when the parameters change. False keeps the earlier ones.
        exact: rows of a tile of exact mode (`row_tiles.tile_for`): log-probs then equal
            a trainer's with this `Policy.exact`, to the last bit, and the cache must
            have the parameters' dtype. 0 without it.
        experts: whether the experts of every token are recorded (`Tokens.experts`), of
            a model that has some and is not exact.
    """

    num_slots: int = 64
    max_prompt_tokens: int = 256
    max_tokens: int = 256
    steps_per_call: int = 32
    prefill_tokens: int = 1024
    max_stop_ids: int = 4
    cache_tokens: int = 0
    guesses: int = 0
    guess_rows: int = 32
    kept_ids: int = 0
    context_tokens: int = 0
    few_shapes: bool = False
    recompute_cache: bool = False
    exact: int = 0
    experts: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in MAY_BE_ZERO and value is not False and value < 1:
                raise ValueError(
                    f"EngineConfig: {name} must be at least 1; got {value}"
                )
        for name in MAY_BE_ZERO:
            if getattr(self, name) < 0:
                raise ValueError(
                    f"EngineConfig: {name} must be at least 0; got "
                    f"{getattr(self, name)}"
                )
        check_tile(self.exact, "EngineConfig")

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sample, prompt and completion."""
        both = self.max_prompt_tokens + self.max_tokens
        return min(self.context_tokens or both, both)

    @property
    def pages_per_sample(self) -> int:
        """Pages that one sample with a prompt of its own needs at most.

        >>> EngineConfig(max_prompt_tokens=63, max_tokens=63).pages_per_sample
        9
        >>> sizes = EngineConfig(max_prompt_tokens=63, max_tokens=63, context_tokens=64)
        >>> sizes.pages_per_sample
        6
        """
        # A sample whose sampling is resumed may have a partly filled page more.
        apart = pages_for(self.max_prompt_tokens) + pages_for(self.max_tokens) + 1
        return min(apart, pages_for(self.max_length) + 2)

    def num_pages(self, split: int) -> int:
        """Pages of the cache, a multiple of `split`.

        Args:
            split: parts into which a mesh splits the slots and the cache.

        Raises:
            ValueError: a part does not hold one sample.
        """
        wanted = self.num_slots * self.pages_per_sample
        if self.cache_tokens:
            wanted = pages_for(self.cache_tokens)
        each = -(-wanted // split)
        if each < self.pages_per_sample:
            needed = self.pages_per_sample * split * PAGE
            where = f" in each of {split} parts of the mesh" if split > 1 else ""
            raise ValueError(
                f"cache_tokens={self.cache_tokens} does not hold one sample of "
                f"{self._longest}{where}; it must be at least {needed}"
            )
        return each * split

    def num_states(self, split: int, *, heavy: bool = False) -> int:
        """Slots for states, of a model with them; a multiple of `split`.

        A running sample has one, its prompt one, and a prompt that is being computed
        another; as many are left for what comes later. Of heavy states there are half
        as many: fewer prefixes are found again, and fewer prompts begin at a time.

        Args:
            split: parts into which a mesh splits the slots.
            heavy: whether a state takes more memory than a quarter of a sample's keys
                and values.
        """
        each = 2 if heavy else 4
        return each * (-(-self.num_slots // split) + 1) * split

    @property
    def _longest(self) -> str:
        if self.max_length == self.context_tokens:
            return f"{self.context_tokens} tokens"
        return (
            f"{self.max_prompt_tokens} prompt tokens and {self.max_tokens} sampled ones"
        )

    def cache_for_groups(self, samples: int, split: int = 1) -> int:
        """Tokens of a cache for prompts of so many samples: `cache_tokens`.

        There is room for twice the prompts that fill the slots, because samples of the
        next prompts begin while the longest of the last prompts still run.

        Args:
            samples: samples of a prompt.
            split: parts into which a mesh splits the slots.

        >>> sizes = EngineConfig(num_slots=64, max_prompt_tokens=256, max_tokens=128)
        >>> sizes.cache_for_groups(8), 64 * (256 + 128)
        (13312, 24576)
        """
        slots = -(-self.num_slots // split)
        prompts = min(slots, 2 * -(-slots // samples))
        pages = prompts * pages_for(self.max_prompt_tokens)
        pages += slots * (pages_for(self.max_tokens) + 1)
        return split * pages * PAGE

    def cache_for_turns(self, turns: int) -> int:
        """Tokens of a cache that keeps every slot's conversation: `cache_tokens`.

        Each further turn may also leave two pages partly filled: the last page of the
        answer before it, and the last page of its own messages.

        Args:
            turns: maximum turns of a conversation.

        >>> sizes = EngineConfig(num_slots=2, max_prompt_tokens=64, max_tokens=16)
        >>> sizes.cache_for_turns(1), sizes.cache_for_turns(3)
        (192, 320)
        """
        pages = self.pages_per_sample + 2 * (turns - 1)
        return self.num_slots * pages * PAGE

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Padded numbers of tokens of a sequence in a prefill call, ascending."""
        # A chunk fills whole pages, except the last one of a segment.
        whole = max(1, min(self.prefill_tokens, LARGEST_CHUNK) // PAGE)
        return _powers(PAGE, PAGE * min(whole, pages_for(self.max_length)))

    def chunk(self, tokens: int) -> int:
        """Padded length of the next chunk of a sequence that lacks so many tokens."""
        return _bucket(self.chunks, tokens)

    def prefill_rows(self, chunk: int, waiting: int, split: int = 1) -> int:
        """Rows per part of the next prefill call: many, or an eighth of it for few.

        Args:
            chunk: padded length of a row.
            waiting: rows of this length that wait, in the part where most do.
            split: parts into which a mesh splits the rows.
        """
        many = max(1, min(self.prefill_tokens // chunk, self.num_slots) // split)
        return many if 2 * waiting > many else -(-many // 8)

    def batch_sizes(self, split: int = 1) -> tuple[int, ...]:
        """Numbers of slots per part of the mesh that a burst may have, ascending.

        >>> EngineConfig(num_slots=64).batch_sizes()
        (8, 12, 16, 24, 32, 48, 64)
        >>> EngineConfig(num_slots=64, few_shapes=True).batch_sizes()
        (8, 16, 32, 64)
        """
        slots = self.num_slots // split
        smallest = min(slots, max(1, SMALLEST_BATCH // split))
        found, size = {slots}, slots
        while size > smallest:
            if not self.few_shapes:
                found.add(-(-3 * size // 4))
            size = max(smallest, -(-size // 2))
            found.add(size)
        return tuple(sorted(found))

    def own_pages(self, tokens: int) -> int:
        """Pages per slot that a burst reads whose longest slot has sampled `tokens`.

        Many pages are a multiple of `WHOLE_PAGES`, so that kernels for TPUs read and
        write a view in whole blocks, without a copy.

        >>> EngineConfig(max_tokens=256, steps_per_call=8).own_pages(100)
        8
        >>> EngineConfig(max_tokens=1000, steps_per_call=8).own_pages(990)
        64
        """
        most = _whole(pages_for(self.max_tokens))
        sizes = self._few(most) if self.few_shapes else _powers(SMALLEST_VIEW, most)
        return _bucket(sizes, pages_for(tokens + self.steps_per_call))

    def shared_pages(self, pages: int) -> int:
        """Padded number of pages that a group shares: powers of 2, and 3/4 of them.

        With `few_shapes` powers of 4, and what one sample needs at most.

        >>> sizes = EngineConfig()
        >>> [sizes.shared_pages(pages) for pages in (1, 5, 9, 13)]
        [4, 8, 12, 16]
        >>> few = EngineConfig(max_prompt_tokens=1024, few_shapes=True)
        >>> [few.shared_pages(pages) for pages in (1, 5, 65, 89)]
        [4, 16, 88, 256]
        """
        if self.few_shapes:
            # Segments of a conversation end in partly filled pages: it may have more.
            sizes = self._few(_whole(self.pages_per_sample))
            while pages > sizes[-1]:
                sizes = self._few(4 * sizes[-1])
            return _bucket(sizes, pages)
        pages = max(pages, min(SMALLEST_VIEW, pages_for(self.max_prompt_tokens)))
        power = 1 << (pages - 1).bit_length()
        middle = power * 3 // 4
        return middle if pages <= middle and middle > 2 * SMALLEST_VIEW else power

    @staticmethod
    def _few(most: int) -> tuple[int, ...]:
        """Pages of views, if there are to be few shapes."""
        return _powers(SMALLEST_VIEW, most, 4)

    def history(self, tokens: int) -> int:
        """Padded length of the samples' tokens, for guesses."""
        return _bucket(_powers(min(256, self.max_length), self.max_length), tokens)

    def changes(self, tokens: int) -> int:
        """Padded number of tokens whose logits are changed.

        >>> [EngineConfig().changes(tokens) for tokens in (1, 33, 300)]
        [32, 256, 1536]
        """
        return _bucket(_powers(32, self.max_length + MOST_BIASES, 8), tokens)

    def members(self, samples: int) -> int:
        """Padded number of samples that read a prompt together, of so many at most.

        >>> EngineConfig().members(6), EngineConfig(few_shapes=True).members(2)
        (8, 8)
        """
        if self.few_shapes and samples > 1:
            return GROUP
        return min(LARGEST_GROUP, 1 << (samples - 1).bit_length())

    def groups(self, needed: int, slots: int, members: int) -> int | None:
        """Padded number of groups of a burst; None if most of their places were empty.

        >>> EngineConfig().groups(9, slots=64, members=8)
        16
        >>> few = EngineConfig(few_shapes=True)
        >>> few.groups(3, slots=64, members=8), few.groups(17, slots=64, members=8)
        (16, None)
        """
        if members > 1 and needed * members > (2 if self.few_shapes else 4) * slots:
            return None
        if self.few_shapes and members > 1:
            return -(-2 * slots // members)
        return 1 << (max(needed, slots // members) - 1).bit_length()


def _powers(smallest: int, largest: int, step: int = 2) -> tuple[int, ...]:
    """Powers of `step` times `smallest` below `largest`, then `largest` itself."""
    sizes, size = [], smallest
    while size < largest:
        sizes.append(size)
        size *= step
    return (*sizes, largest)


def _bucket(buckets: tuple[int, ...], length: int) -> int:
    return buckets[min(bisect.bisect_left(buckets, length), len(buckets) - 1)]


def _whole(pages: int) -> int:
    """Rounds many pages up to a multiple of `WHOLE_PAGES`; keeps small numbers."""
    return pages if pages <= WHOLE_PAGES else -(-pages // WHOLE_PAGES) * WHOLE_PAGES
