"""Token ids together with what the sampler knows about each of them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxrl_post.pictures.numbered import Picture, pictures_in
from jaxrl_post.pictures.stored import from_json, to_json

__all__ = ["Tokens"]

_DTYPES = {
    "ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "log_masses": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "sampled": np.dtype(np.bool_),
}
# Arrays that more dimensions follow.
_WIDER = ("kept", "experts", "lead")


@dataclass(frozen=True, eq=False)
class Tokens:
    """A piece of text as the sampler saw it: aligned NumPy arrays [tokens].

    All token fields travel in this type from the sampler to the packed batch. `+` joins
    two pieces; a slice takes a part.

    Attributes:
        ids: int32 token ids; tokens of pictures have negative numbers
            (`pictures.number`).
        logprobs: float32 log-probabilities under the sampler's full softmax; 0 for a
            token that was not sampled.
        log_masses: float32 log of the probability mass that top-k, top-p and min-p
            kept, or what else `logprobs` exceed the drawn distribution's by; 0 where
            nothing was cut or sampled.
        versions: int32 version of the sampling parameters; -1 if not sampled.
        sampled: bool, True if the policy sampled the token. Only these are trained on.
        kept: int32 [tokens, most], ids of the tokens that top-k, top-p and min-p kept,
            padded with -1; none where nothing was cut or recorded.
        pictures: keeps the pictures of `ids` in memory, perhaps with others.
        experts: int16 [tokens, layers, chosen], the experts of the token before each
            token, which computed the distribution from which it was sampled. -1 where
            they are not known; [tokens, 0, 0] if none is.
        lead: int16 [before, layers, chosen], the same of the tokens before this piece,
            as the sampler saw them, up to its first token; [0, 0, 0] if not known. A
            part from a later token on does not have it.

    Raises:
        ValueError: the arrays are not 1-D (`kept` 2-D, `experts` 3-D), or differ in
            length.
        PictureError: no picture in memory has a number of `ids`.

    >>> prompt = Tokens.context([5, 6])
    >>> answer = Tokens.generated([7], logprobs=[-0.5], version=3)
    >>> whole = prompt + answer
    >>> whole.ids.tolist(), whole.sampled.tolist(), whole[2:] == answer
    ([5, 6, 7], [False, False, True], True)
    """

    ids: np.ndarray
    logprobs: np.ndarray
    log_masses: np.ndarray
    versions: np.ndarray
    sampled: np.ndarray
    kept: np.ndarray
    pictures: tuple[Picture, ...] = ()
    experts: np.ndarray = field(default_factory=lambda: _no_experts(0))
    lead: np.ndarray = field(default_factory=lambda: _no_experts(0))

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            array = vars(self)[name]
            # A step makes thousands of these, and nearly all need no conversion.
            if type(array) is not np.ndarray or array.dtype != dtype:
                object.__setattr__(self, name, np.asarray(array, dtype))
        shape = self.ids.shape
        # Empty pieces are alike.
        if not self.experts.size:
            object.__setattr__(self, "experts", _no_experts(len(self.ids)))
        arrays = [vars(self)[name] for name in _DTYPES]
        if (
            len(shape) != 1
            or any(array.shape != shape for array in arrays)
            or self.kept.shape[:-1] != shape
            or self.experts.shape[:-2] != shape
        ):
            names = (*_DTYPES, "kept", "experts")
            shapes = {name: getattr(self, name).shape for name in names}
            raise ValueError(
                "Tokens: the arrays must be 1-D, kept 2-D, experts 3-D, and of equal "
                f"length; got {shapes}"
            )
        object.__setattr__(self, "kept", _narrow(self.kept))
        if not self.pictures and len(self.ids) and self.ids.min() < 0:
            object.__setattr__(self, "pictures", pictures_in(self.ids))

    @classmethod
    def context(cls, ids: Iterable[int]) -> Tokens:
        """Tokens that the policy did not sample: prompts and environments' messages."""
        array = np.array(list(ids), np.int32)
        size = len(array)
        if not size:
            return _NONE
        zeros = np.zeros(size, np.float32)
        no_versions = np.full(size, -1, np.int32)
        sampled = np.zeros(size, np.bool_)
        return cls(array, zeros, zeros, no_versions, sampled, _no_ids(size))

    @classmethod
    def generated(
        cls,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        *,
        version: int,
        log_masses: Sequence[float] | np.ndarray | None = None,
        kept: np.ndarray | None = None,
        experts: np.ndarray | None = None,
    ) -> Tokens:
        """Tokens that one version of the policy sampled.

        Args:
            ids: int32 [tokens].
            logprobs: float32 [tokens].
            version: version of the parameters that sampled the tokens.
            log_masses: float32 [tokens]; None if no probability mass was cut off.
            kept: int32 [tokens, most]; None if no ids were recorded.
            experts: int16 [tokens, layers, chosen]; None if not recorded.
        """
        size = len(ids)
        masses = np.zeros(size) if log_masses is None else log_masses
        # Copies: a slice of a device transfer would keep the whole transfer alive.
        return cls(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            np.array(masses, np.float32),
            np.full(size, version, np.int32),
            np.ones(size, np.bool_),
            _no_ids(size) if kept is None else np.array(kept, np.int32),
            experts=_no_experts(size)
            if experts is None
            else np.array(experts, np.int16),
        )

    @classmethod
    def concatenate(cls, parts: Iterable[Tokens]) -> Tokens:
        """Joins pieces in order; the result of no pieces is empty."""
        # Most turns have one piece, which needs no new arrays.
        parts = [part for part in parts if len(part)]
        if len(parts) < 2:
            return parts[0] if parts else _NONE
        most = max(part.kept.shape[1] for part in parts)
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in _DTYPES
            ),
            kept=np.concatenate([part.padded_kept(most) for part in parts]),
            pictures=tuple(dict.fromkeys(each for p in parts for each in p.pictures)),
            experts=_joined([part.experts for part in parts]),
            lead=parts[0].lead,
        )

    def with_experts(self, experts: np.ndarray) -> Tokens:
        """The same tokens; int16 experts [tokens, layers, chosen] where not known.

        Raises:
            ValueError: the number of tokens differs.
        """
        if self.experts.size:
            experts = np.where(self.experts >= 0, self.experts, experts)
        return replace(self, experts=experts.astype(np.int16))

    @property
    def unsampled(self) -> Tokens:
        """The same tokens as context."""
        return Tokens.context(self.ids.tolist()).with_experts(self.experts)

    def led_by(self, lead: np.ndarray | None) -> Tokens:
        """The same tokens with another `lead`; None for none."""
        if lead is None:
            lead = _no_experts(0)
        return replace(self, lead=lead) if lead.size or self.lead.size else self

    def read_before(self, sampled: Tokens, between: int = 0) -> Tokens:
        """The same context, with the experts that read it, if they are known.

        Args:
            sampled: what was sampled after it, with its `lead`.
            between: number of tokens between both.
        """
        if not sampled.lead.size:
            return self
        end = len(sampled.lead) - between
        return self.with_experts(sampled.lead[end - len(self) : end])

    def padded_kept(self, width: int) -> np.ndarray:
        """`kept` with `width` columns, int32 [tokens, width]; at least its own."""
        if width == self.kept.shape[1]:
            # Nearly always, and `np.pad` takes longer than all else that joins pieces.
            return self.kept
        return np.pad(
            self.kept,
            ((0, 0), (0, width - self.kept.shape[1])),
            constant_values=np.int32(-1),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens.concatenate([self, other])

    def __getitem__(self, span: slice) -> Tokens:
        # A part of checked arrays needs no check, and a step takes thousands of parts.
        part = object.__new__(Tokens)
        for name in _DTYPES:
            vars(part)[name] = vars(self)[name][span]
        vars(part)["kept"] = _narrow(self.kept[span])
        vars(part)["pictures"] = self.pictures
        experts = self.experts[span]
        # Empty pieces are alike.
        vars(part)["experts"] = experts if experts.size else _no_experts(len(part.ids))
        begins = span.indices(len(self.ids))[0] == 0
        vars(part)["lead"] = self.lead if begins and experts.size else _no_experts(0)
        return part

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        # Compare bits, because a checkpoint must restore -0.0 and NaN exactly.
        return all(
            getattr(self, name).shape == getattr(other, name).shape for name in _WIDER
        ) and all(
            getattr(self, name).tobytes() == getattr(other, name).tobytes()
            for name in (*_DTYPES, *_WIDER)
        )

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """A JSON value from which `from_json` restores the tokens exactly."""
        value: dict[str, Any]
        value = {name: getattr(self, name).tolist() for name in _DTYPES}
        value["kept"] = [[i for i in ids if i >= 0] for ids in self.kept.tolist()]
        if self.pictures:
            value["pictures"] = [to_json(each) for each in pictures_in(self.ids)]
        for name in ("experts", "lead"):
            if (array := getattr(self, name)).size:
                # As text a token of a large model would take thousands of characters.
                coded = base64.b64encode(array.astype("<i2").tobytes()).decode()
                value[name] = [list(array.shape), coded]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Tokens:
        """Restores what `to_json` made."""
        # Checkpoints of earlier versions hold no ids.
        ragged = value.get("kept", [[]] * len(value["ids"]))
        most = max(map(len, ragged), default=0)
        kept = [[*ids, *[-1] * (most - len(ids))] for ids in ragged]
        arrays = {name: np.array(value[name], dtype) for name, dtype in _DTYPES.items()}
        # The process that stored them gave its own numbers.
        stored, pictures = arrays["ids"].copy(), []
        for each in value.get("pictures", ()):
            first, picture = from_json(each)
            there = (stored >= first) & (stored < first + picture.num_tokens)
            arrays["ids"][there] = stored[there] - first + picture.first
            pictures.append(picture)
        return cls(
            **arrays,
            kept=np.array(kept, np.int32).reshape(len(kept), most),
            pictures=tuple(pictures),
            **{
                name: np.frombuffer(base64.b64decode(coded), "<i2")
                .astype(np.int16)
                .reshape(shape)
                for name in ("experts", "lead")
                for shape, coded in [value.get(name, ([], ""))]
                if shape
            },
        )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Joins experts; a part that does not know its own gets -1."""
    known = next((part.shape[1:] for part in parts if part.size), None)
    if known is None:
        return _no_experts(sum(map(len, parts)))
    return np.concatenate(
        [
            part if part.size else np.full((len(part), *known), -1, np.int16)
            for part in parts
        ]
    )


def _narrow(kept: np.ndarray) -> np.ndarray:
    """Kept ids without columns of padding, so that equal pieces have equal arrays."""
    if not kept.shape[1]:
        return kept
    most = int((kept >= 0).sum(axis=1).max(initial=0))
    return np.ascontiguousarray(kept[:, :most], np.int32)


def _no_ids(size: int) -> np.ndarray:
    return np.zeros((size, 0), np.int32)


def _no_experts(size: int) -> np.ndarray:
    return np.zeros((size, 0, 0), np.int16)


_NONE = Tokens(*(np.zeros(0, dtype) for dtype in _DTYPES.values()), kept=_no_ids(0))
