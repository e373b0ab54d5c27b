"""Token ids together with what the sampler knows about each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

    Raises:
        ValueError: the arrays are not 1-D (`kept` 2-D), or differ in length.
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

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            array = vars(self)[name]
            # A step makes thousands of these, and nearly all need no conversion.
            if type(array) is not np.ndarray or array.dtype != dtype:
                object.__setattr__(self, name, np.asarray(array, dtype))
        shape = self.ids.shape
        arrays = [vars(self)[name] for name in _DTYPES]
        if (
            len(shape) != 1
            or any(array.shape != shape for array in arrays)
            or self.kept.shape[:-1] != shape
        ):
            shapes = {name: getattr(self, name).shape for name in (*_DTYPES, "kept")}
            raise ValueError(
                "Tokens: the arrays must be 1-D, kept 2-D, and of equal length; got "
                f"{shapes}"
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
    ) -> Tokens:
        """Tokens that one version of the policy sampled.

        Args:
            ids: int32 [tokens].
            logprobs: float32 [tokens].
            version: version of the parameters that sampled the tokens.
            log_masses: float32 [tokens]; None if no probability mass was cut off.
            kept: int32 [tokens, most]; None if no ids were recorded.
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
        )

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
        return part

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        # Compare bits, because a checkpoint must restore -0.0 and NaN exactly.
        return self.kept.shape == other.kept.shape and all(
            getattr(self, name).tobytes() == getattr(other, name).tobytes()
            for name in (*_DTYPES, "kept")
        )

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, list[Any]]:
        """A JSON value from which `from_json` restores the tokens exactly."""
        value: dict[str, list[Any]]
        value = {name: getattr(self, name).tolist() for name in _DTYPES}
        value["kept"] = [[i for i in ids if i >= 0] for ids in self.kept.tolist()]
        if self.pictures:
            value["pictures"] = [to_json(each) for each in pictures_in(self.ids)]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[Any]]) -> Tokens:
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
        )


def _narrow(kept: np.ndarray) -> np.ndarray:
    """Kept ids without columns of padding, so that equal pieces have equal arrays."""
    if not kept.shape[1]:
        return kept
    most = int((kept >= 0).sum(axis=1).max(initial=0))
    return np.ascontiguousarray(kept[:, :most], np.int32)


def _no_ids(size: int) -> np.ndarray:
    return np.zeros((size, 0), np.int32)


_NONE = Tokens(*(np.zeros(0, dtype) for dtype in _DTYPES.values()), kept=_no_ids(0))
