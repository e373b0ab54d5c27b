"""Token ids together with what the sampler knows about each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Tokens"]

_DTYPES = {
    "ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "log_masses": np.dtype(np.float32),
    "kept_from": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "sampled": np.dtype(np.bool_),
}


@dataclass(frozen=True, eq=False)
class Tokens:
    """A piece of text as the sampler saw it: six aligned NumPy arrays [tokens].

    All token fields travel in this type from the sampler to the packed batch. `+` joins
    two pieces; a slice takes a part.

    Attributes:
        ids: int32 token ids.
        logprobs: float32 log-probabilities under the sampler's full softmax; 0 for a
            token that was not sampled.
        log_masses: float32 log of the probability mass that top-k, top-p and min-p
            kept; 0 where nothing was cut or sampled.
        kept_from: float32 probability from which on they kept tokens, between that of
            the least kept token and the next; 0 where nothing was cut or sampled.
        versions: int32 version of the sampling parameters; -1 if not sampled.
        sampled: bool, True if the policy sampled the token. Only these are trained on.

    Raises:
        ValueError: the arrays are not 1-D, or differ in length.

    >>> prompt = Tokens.context([5, 6])
    >>> answer = Tokens.generated([7], logprobs=[-0.5], version=3)
    >>> whole = prompt + answer
    >>> whole.ids.tolist(), whole.sampled.tolist(), whole[2:] == answer
    ([5, 6, 7], [False, False, True], True)
    """

    ids: np.ndarray
    logprobs: np.ndarray
    log_masses: np.ndarray
    kept_from: np.ndarray
    versions: np.ndarray
    sampled: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            array = vars(self)[name]
            # A step makes thousands of these, and nearly all need no conversion.
            if type(array) is not np.ndarray or array.dtype != dtype:
                object.__setattr__(self, name, np.asarray(array, dtype))
        shape = self.ids.shape
        arrays = [vars(self)[name] for name in _DTYPES]
        if len(shape) != 1 or any(array.shape != shape for array in arrays):
            shapes = {name: getattr(self, name).shape for name in _DTYPES}
            raise ValueError(
                f"Tokens: the arrays must be 1-D and of equal length; got {shapes}"
            )

    @classmethod
    def context(cls, ids: Iterable[int]) -> Tokens:
        """Tokens that the policy did not sample: prompts and environments' messages."""
        array = np.array(list(ids), np.int32)
        size = len(array)
        if not size:
            return _NONE
        zeros = np.zeros(size, np.float32)
        nobody = np.full(size, -1, np.int32)
        return cls(array, zeros, zeros, zeros, nobody, np.zeros(size, np.bool_))

    @classmethod
    def generated(
        cls,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        *,
        version: int,
        log_masses: Sequence[float] | np.ndarray | None = None,
        kept_from: Sequence[float] | np.ndarray | None = None,
    ) -> Tokens:
        """Tokens that one version of the policy sampled.

        Args:
            ids: int32 [tokens].
            logprobs: float32 [tokens].
            version: version of the parameters that sampled the tokens.
            log_masses: float32 [tokens]; None if no probability mass was cut off.
            kept_from: float32 [tokens]; None if no token was cut off.
        """
        size = len(ids)
        masses = np.zeros(size) if log_masses is None else log_masses
        least = np.zeros(size) if kept_from is None else kept_from
        # Copies: a slice of a device transfer would keep the whole transfer alive.
        return cls(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            np.array(masses, np.float32),
            np.array(least, np.float32),
            np.full(size, version, np.int32),
            np.ones(size, np.bool_),
        )

    @classmethod
    def concatenate(cls, parts: Iterable[Tokens]) -> Tokens:
        """Joins pieces in order; the result of no pieces is empty."""
        # Most turns have one piece, which needs no new arrays.
        parts = [part for part in parts if len(part)]
        if len(parts) < 2:
            return parts[0] if parts else _NONE
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in _DTYPES
            )
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens.concatenate([self, other])

    def __getitem__(self, span: slice) -> Tokens:
        return Tokens(*(getattr(self, name)[span] for name in _DTYPES))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        # Compare bits, because a checkpoint must restore -0.0 and NaN exactly.
        return all(
            getattr(self, name).tobytes() == getattr(other, name).tobytes()
            for name in _DTYPES
        )

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, list[Any]]:
        """A JSON value from which `from_json` restores the tokens exactly."""
        return {name: getattr(self, name).tolist() for name in _DTYPES}

    @classmethod
    def from_json(cls, value: Mapping[str, Sequence[Any]]) -> Tokens:
        """Restores what `to_json` made."""
        return cls(*(np.array(value[name], dtype) for name, dtype in _DTYPES.items()))


_NONE = Tokens(*(np.zeros(0, dtype) for dtype in _DTYPES.values()))
