"""The arrays that the sampler's device functions take and return."""

import dataclasses
from typing import NamedTuple

from flax import struct

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models.vision import RowPictures
from jaxrl_post.sampler.limits import Changes
from jaxrl_post.sampler.pages import Pages, Shared, StateSlots
from jaxrl_post.sampler.sampling import Drawing, SamplingArrays
from jaxrl_post.types import Array, Float, HostOrDevice, Int, UInt

__all__ = ["Burst", "Emitted", "PrefillRows", "Prefilled", "Progress", "Rows"]


@struct.dataclass
class PrefillRows:
    """Chunks of segments; a fixed number, unused ones have no page.

    Attributes:
        tokens: int32, padded on the right with any id.
        starts: int32, position of each row's first token.
        sizes: int32, number of tokens of each row.
        pages: int32, pages to write to; the number of pages or more for none.
        shared: the tokens before the chunks; None if no chunk has any.
        states: of a model with states, else None.
        pictures: None if no row has any before its end.
    """

    tokens: Int[HostOrDevice, "rows length"]
    starts: Int[HostOrDevice, " rows"]
    sizes: Int[HostOrDevice, " rows"]
    pages: Int[HostOrDevice, "rows chunk_pages"]
    shared: Shared | None
    states: StateSlots | None = None
    pictures: RowPictures | None = None


@struct.dataclass
class Progress:
    """Progress of the samples; a burst begins with it and returns it.

    Attributes:
        tokens: int32, the token to feed next.
        positions: int32, the position of that token.
        remaining: int32, maximum number of tokens still to sample.
        counts: int32, number of own entries that have been computed.
    """

    tokens: Int[HostOrDevice, " rows"]
    positions: Int[HostOrDevice, " rows"]
    remaining: Int[HostOrDevice, " rows"]
    counts: Int[HostOrDevice, " rows"]


@struct.dataclass
class Rows:
    """Samples that decode together; a fixed number, unused ones have nothing remaining.

    Attributes:
        progress: how far each row has come.
        remaining: int32, tokens still to sample as far as the host knows; a burst uses
            the smaller of this and the progress. 0 for a row that has ended for a
            reason that only the host sees.
        prompt_ids: uint32; determines the noise with `sample_indices` and the key.
        sample_indices: uint32.
        sampling: per-sample sampling parameters.
        stop_ids: int32 [rows, stops], padded with -1.
        starts: int32, position of each row's first own entry.
        pages: int32, own pages; the number of pages or more for none.
        shared: the context of the samples.
        history: int32, all tokens of each row, padded with any; None without guesses.
        allowed: uint32, the tokens that the first step may draw, as in
            `sampling.sample`; None if no row is constrained. A burst with constraints
            has one step, since the host must see a token to tell what may follow.
        changes: of logits, as in `sampling.sample`; None if no row has any. With
            penalties a burst has one step, too.
        states: of a model with states, else None.
        shifts: int32, rotary position of a row's tokens, less their position; None for
            a model of text.
    """

    progress: Progress
    remaining: Int[HostOrDevice, " rows"]
    prompt_ids: UInt[HostOrDevice, " rows"]
    sample_indices: UInt[HostOrDevice, " rows"]
    sampling: SamplingArrays
    stop_ids: Int[HostOrDevice, "rows stops"]
    starts: Int[HostOrDevice, " rows"]
    pages: Int[HostOrDevice, "rows own_pages"]
    shared: Shared
    history: Int[HostOrDevice, "rows history"] | None = None
    allowed: UInt[HostOrDevice, "rows words"] | None = None
    changes: Changes | None = None
    states: StateSlots | None = None
    shifts: Int[HostOrDevice, " rows"] | None = None


@struct.dataclass
class Emitted:
    """The tokens that `decode` sampled, [steps, rows]; -1 where a row sampled none.

    The other fields are as in `Sampled`. `experts`, int16 [steps, rows, layers,
    chosen], have computed the token that was fed for this one; None if not recorded.
    """

    tokens: Int[HostOrDevice, "steps rows"]
    logprobs: Float[HostOrDevice, "steps rows"]
    log_masses: Float[HostOrDevice, "steps rows"]
    kept: Int[HostOrDevice, "steps rows kept"] | None
    alternatives: Int[HostOrDevice, "steps rows most"] | None
    alternatives_logprobs: Float[HostOrDevice, "steps rows most"] | None
    experts: Int[HostOrDevice, "steps rows layers chosen"] | None = None


@dataclasses.dataclass(frozen=True)
class Burst:
    """Options of `decode`; static.

    Attributes:
        steps: most tokens of a row.
        drawing: how tokens are drawn.
        split: parts into which the mesh splits the rows.
        exact: rows of a tile of exact mode, in which a token's log-prob depends on its
            path alone, to the last bit (`models.exact`); 0 without it.
        guesses: tokens that a pass guesses, from the rows' history or by the draft
            model.
        kernels: as in `models.forward`.
        experts: whether the experts of every token are recorded.
    """

    steps: int
    drawing: Drawing
    split: int = 1
    exact: int = 0
    guesses: int = 0
    kernels: Implementation = "auto"
    experts: bool = False


class Prefilled(NamedTuple):
    """The results of `prefill_states`.

    Attributes:
        pages: with the keys and values of the chunks.
        hidden: final hidden states.
        experts: int16, of every token, as `models.forward_with_experts` has them; None
            if not recorded.
        draft_pages: of a layer for multi-token prediction; None without one.
    """

    pages: Pages
    hidden: Float[Array, "rows length hidden"]
    experts: Int[Array, "rows length layers chosen"] | None
    draft_pages: Pages | None = None
