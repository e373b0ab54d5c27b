"""The messages between the trainer and samplers in other processes, as bytes.

A message is JSON in which arrays are raw bytes behind it, in their order: four bytes
with the length of the JSON, the JSON, the arrays. Nothing in it is executed, and a
message that is not whole is refused.
"""

import functools
import json
import math
import struct
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from jaxrl_post.fleet.orders import Grant, News, Order, PolicyVersion, Progress, Revoke
from jaxrl_post.sampler.requests import (
    MOST_ALTERNATIVES,
    MOST_INT,
    Alternatives,
    FinishReason,
    Request,
    SamplingParams,
)
from jaxrl_post.tokens import Tokens

__all__ = [
    "MessageError",
    "pack",
    "read_news",
    "read_orders",
    "unpack",
    "why_not_elsewhere",
    "write_news",
    "write_orders",
]

_NO_EXPERTS = np.zeros((0, 0, 0), np.int16)
_LENGTH = struct.Struct("!I")
_DTYPES = {name: np.dtype(name) for name in ("int16", "int32", "int64", "float32")}
# The one key of the object that stands for an array.
_ARRAY = "@"
# Tuples of more integers are arrays, such as prompts.
_FEW = 8
# Written as the lists of their fields.
_RECORDS = (Grant, Revoke, PolicyVersion, Request, SamplingParams)
# Errors of code that reads a value which is not what it expects.
_MISREAD = (
    *(AttributeError, IndexError, KeyError, TypeError, ValueError),
    *(OverflowError, RecursionError, struct.error),
)


class MessageError(ValueError):
    """A message is not what this side can read."""


def pack(value: Any) -> bytes:
    """Writes a JSON value with NumPy arrays (int16, int32, int64, float32) in it.

    Raises:
        TypeError: there is something else in it.

    >>> unpack(pack({"ids": np.array([3, 4], np.int32)}))["ids"].tolist()
    [3, 4]
    """
    arrays = list[bytes]()

    def array(item: Any) -> dict[str, Any]:
        if not isinstance(item, np.ndarray) or item.dtype.name not in _DTYPES:
            raise TypeError(f"a message holds no {type(item).__name__}")
        arrays.append(item.tobytes())
        return {_ARRAY: [item.dtype.name, item.shape]}

    head = json.dumps(value, default=array, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *arrays])


def unpack(data: bytes) -> Any:
    """Reads what `pack` wrote; its arrays take no more memory than the message.

    Raises:
        MessageError: the message is not whole, or is no such message.
    """
    left = memoryview(data)[_LENGTH.size :]

    def array(item: dict[str, Any]) -> Any:
        nonlocal left
        if item.keys() != {_ARRAY}:
            return item
        name, shape = item[_ARRAY]
        if not all(type(n) is int and 0 <= n <= len(data) for n in shape):
            raise ValueError(f"an array has the shape {shape}")
        size = math.prod(shape) * _DTYPES[name].itemsize
        part, left = left[:size], left[size:]
        if len(part) != size:
            raise ValueError("its end is missing")
        return np.frombuffer(part, _DTYPES[name]).reshape(shape).copy()

    def read() -> Any:
        nonlocal left
        (size,) = _LENGTH.unpack(data[: _LENGTH.size])
        head, left = left[:size], left[size:]
        if len(head) != size:
            raise ValueError("its end is missing")
        value = json.loads(bytes(head), object_hook=array)
        if left:
            raise ValueError(f"{len(left)} bytes are too many")
        return value

    return _checked(read, "message")


def write_news(news: News) -> Any:
    """Writes the news of a sampler as a value for `pack`.

    Raises:
        ValueError: the tokens of a sample are of several versions.
    """
    return {
        **news._asdict(),
        "refused": list(news.refused.items()),
        "progress": _columns(news.progress) if news.progress else None,
        "probed": list(news.probed.items()),
    }


def read_news(value: Any) -> News:
    """Reads what `write_news` wrote.

    Raises:
        MessageError: the value is no news.
    """

    def read() -> News:
        columns = value["progress"]
        return News(
            _read(int, value["number"]),
            _read(str, value["doing"]),
            _read(tuple[str, ...], value["ready"]),
            dict(_read(tuple[tuple[str, str], ...], value["refused"])),
            [] if columns is None else _progress(columns),
            dict(_read(tuple[tuple[str, float], ...], value["probed"])),
        )

    return _checked(read, "news")


def write_orders(orders: Sequence[tuple[int, Order]]) -> Any:
    """Writes orders with their numbers as a value for `pack`."""
    return [[number, type(each).__name__, _written(each)] for number, each in orders]


def read_orders(value: Any) -> list[tuple[int, Order]]:
    """Reads what `write_orders` wrote.

    Raises:
        MessageError: the value holds no orders.
    """
    kinds = {kind.__name__: kind for kind in (Grant, Revoke)}

    def read() -> list[tuple[int, Order]]:
        return [
            (_read(int, number), _read(kinds[_read(str, kind)], order))
            for number, kind, order in _read(list, value)
        ]

    return _checked(read, "orders")


def why_not_elsewhere(request: Request) -> str | None:
    """Says why another process cannot sample a request; None if it can."""
    if request.constrain is not None:
        return "has a grammar, which only the trainer's own sampler has"
    if request.sampling.prompt_scores:
        return "asks for the log-probs of its prompt"
    if request.pictures:
        return "has pictures, which only the trainer's own sampler sees"
    return None


def _checked[Value](read: Callable[[], Value], name: str) -> Value:
    try:
        return read()
    except _MISREAD as error:
        raise MessageError(
            f"{name}: cannot be read: {type(error).__name__}: {error}; is the other "
            "side of another version?"
        ) from error


# News: a sampler tells of hundreds of samples at a time, a few tokens of each. So they
# are columns: all tokens are one array, and each sample is a row of numbers.


def _columns(progress: Sequence[Progress]) -> dict[str, Any]:
    whole = Tokens.concatenate(each.tokens for each in progress)
    rows = np.array(
        [
            (
                each.lease,
                each.index,
                each.start,
                len(each.tokens),
                each.tokens.versions[0] if len(each.tokens) else -1,
            )
            for each in progress
        ],
        np.int64,
    )
    if (np.repeat(rows[:, 4], rows[:, 3]) != whole.versions).any():
        raise ValueError("news: the tokens of a sample must be of one version")
    asked = [at for at, each in enumerate(progress) if each.alternatives is not None]
    others = [each.alternatives for each in progress if each.alternatives is not None]
    led = [at for at, each in enumerate(progress) if each.tokens.lead.size]
    leads = [progress[at].tokens.lead for at in led]
    # All bits, because -0.0 and NaN must come back.
    cut = whole.log_masses.view(np.int32).any()
    return {
        "rows": rows,
        "ids": whole.ids,
        "logprobs": whole.logprobs,
        "log_masses": whole.log_masses if cut else None,
        "kept": whole.kept if whole.kept.size else None,
        "experts": whole.experts if whole.experts.size else None,
        "led": [(at, len(lead)) for at, lead in zip(led, leads, strict=True)],
        "lead": np.concatenate(leads) if leads else None,
        "asked": asked,
        "alternatives": sum(others[1:], others[0]) if others else None,
        "ended": [
            (at, *each[5:])
            for at, each in enumerate(progress)
            if each[5:] != (None, "", False)
        ],
    }


def _progress(columns: Mapping[str, Any]) -> list[Progress]:
    rows = _array(columns["rows"], np.int64, 5)
    whole = _tokens(columns, rows)
    ends = np.cumsum(rows[:, 3]).tolist()
    found = [
        Progress(lease, index, start, whole[end - count : end])
        for (lease, index, start, count, _), end in zip(
            rows.tolist(), ends, strict=True
        )
    ]
    for at, lead in _leads(columns, whole.experts.shape[1:]):
        found[at] = found[at]._replace(tokens=found[at].tokens.led_by(lead))
    ended = _read(tuple[tuple[int, str | None, str, bool], ...], columns["ended"])
    for at, reason, error, refused in ended:
        if reason not in (None, *get_args(FinishReason)) or not 0 <= at < len(found):
            raise ValueError(f"sample {at} ended with {reason!r}")
        found[at] = found[at]._replace(
            finish_reason=reason, error=error, refused=refused
        )
    begin = 0
    for at in _read(tuple[int, ...], columns["asked"]):
        ids, logprobs = columns["alternatives"]
        _array(ids, np.int32, MOST_ALTERNATIVES)
        _array(logprobs, np.float32, MOST_ALTERNATIVES)
        end = begin + len(found[at].tokens)
        if at < 0 or not end <= len(ids) == len(logprobs):
            raise ValueError(f"the alternatives of sample {at} are missing")
        others = Alternatives(ids[begin:end], logprobs[begin:end])
        found[at], begin = found[at]._replace(alternatives=others), end
    return found


def _tokens(columns: Mapping[str, Any], rows: np.ndarray) -> Tokens:
    """The tokens of all samples, one after the other."""
    ids, counts = _array(columns["ids"], np.int32), rows[:, 3]
    total, masses, kept = len(ids), columns["log_masses"], columns["kept"]
    experts = columns["experts"]
    if ((counts < 0) | (counts > total)).any() or counts.sum() != total:
        raise ValueError(f"{total} tokens are there, others are counted")
    return Tokens(
        ids,
        _array(columns["logprobs"], np.float32),
        np.zeros(total, np.float32) if masses is None else _array(masses, np.float32),
        np.repeat(rows[:, 4], counts).astype(np.int32),
        np.ones(total, np.bool_),
        np.zeros((total, 0), np.int32) if kept is None else _array(kept, np.int32, -1),
        experts=_NO_EXPERTS if experts is None else _array(experts, np.int16, -2),
    )


def _leads(
    columns: Mapping[str, Any], width: tuple[int, ...]
) -> Iterator[tuple[int, np.ndarray]]:
    """The samples whose `Tokens.lead` is there, each with it."""
    led = _read(tuple[tuple[int, int], ...], columns["led"])
    whole = _array(columns["lead"], np.int16, -2) if led else _NO_EXPERTS
    if sum(count for _, count in led) != len(whole) or any(min(e) < 0 for e in led):
        raise ValueError(f"{len(whole)} rows of experts are there, others are counted")
    if led and whole.shape[1:] != width:
        raise ValueError(
            f"a prompt's experts are {whole.shape[1:]} a token, and its answer's "
            f"are {width}"
        )
    end = 0
    for at, count in led:
        end += count
        yield at, whole[end - count : end]


def _array(value: Any, dtype: Any, width: int = 0) -> np.ndarray:
    """Checks an array's dtype and shape, [n] or [n, width].

    A negative width stands for as many dimensions of any width.
    """
    shape = value.shape[1:] if isinstance(value, np.ndarray) and value.ndim else None
    expected = (width,) * max(1, -width) if width else ()
    if shape is None or value.dtype != dtype or len(shape) != len(expected):
        raise TypeError(f"an array of {np.dtype(dtype).name} is missing")
    if width > 0 and shape != expected:
        raise TypeError(f"an array must have rows of {width}; got {value.shape}")
    return value


# Orders: records, which are lists of their fields, read by their annotations.


def _written(value: Any) -> Any:
    if isinstance(value, _RECORDS):
        return [_written(getattr(value, name)) for name in _fields(type(value))]
    if isinstance(value, tuple):
        if len(value) > _FEW and all(type(each) is int for each in value):
            wide = max(value) > MOST_INT or min(value) < -MOST_INT
            return np.array(value, np.int64 if wide else np.int32)
        return [_written(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _read(kind: Any, value: Any) -> Any:
    """Reads a value by the annotation that it must have."""
    if kind in _RECORDS:
        fields = _fields(kind)
        if len(_read(list, value)) != len(fields):
            raise TypeError(f"{kind.__name__} with {len(value)} fields")
        read = map(_read, fields.values(), value)
        return kind(**dict(zip(fields, read, strict=True)))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(inner[0], value)
    if origin is tuple:
        if isinstance(value, np.ndarray) and value.ndim == 1:
            value = value.tolist()
        items = _read(list, value)
        kinds = [inner[0]] * len(items) if inner[-1] is ... else inner
        return tuple(_read(k, each) for k, each in zip(kinds, items, strict=True))
    if type(value) is not kind and (kind is not float or type(value) is not int):
        raise TypeError(f"{type(value).__name__} {value!r:.50} for {kind.__name__}")
    return kind(value)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The annotations of a record's fields in their order."""
    hints = get_type_hints(kind)
    return {name: hint for name, hint in hints.items() if name != "constrain"}
