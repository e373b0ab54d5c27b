"""The messages between the trainer and samplers in other processes, as bytes.

A message is JSON in which arrays are raw bytes behind it: four bytes with the length of
the JSON, the JSON, the arrays. Nothing in it is executed, and a message that is not
whole is refused.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_post.fleet.leases import Grant, News, Order, Policy, Progress, Revoke
from jaxrl_post.sampler.requests import Alternatives, Request, SamplingParams
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

_LENGTH = struct.Struct("!I")
_DTYPES = {name: np.dtype(name) for name in ("bool", "int32", "float32")}
# Key of the object that stands for an array.
_ARRAY = "@"


class MessageError(ValueError):
    """A message is not what this side can read."""


def pack(value: Any) -> bytes:
    """Writes a JSON value with NumPy arrays (bool, int32, float32) in it.

    >>> unpack(pack({"ids": np.array([3, 4], np.int32)}))["ids"].tolist()
    [3, 4]
    """
    arrays, end = list[bytes](), 0

    def array(item: Any) -> dict[str, Any]:
        nonlocal end
        if not isinstance(item, np.ndarray) or item.dtype.name not in _DTYPES:
            raise TypeError(f"a message holds no {type(item).__name__}")
        arrays.append(item.tobytes())
        begin, end = end, end + item.nbytes
        return {_ARRAY: [item.dtype.name, item.shape, begin]}

    head = json.dumps(value, default=array).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *arrays])


def unpack(data: bytes) -> Any:
    """Reads what `pack` wrote.

    Raises:
        MessageError: the message is not whole, or is no such message.
    """
    body = memoryview(data)

    def array(item: dict[str, Any]) -> Any:
        if _ARRAY not in item:
            return item
        name, shape, begin = item[_ARRAY]
        dtype = _DTYPES[name]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin)):
            raise ValueError("an array's shape is not read")
        size = math.prod(shape) * dtype.itemsize
        part = arrays[begin : begin + size]
        if len(part) != size:
            raise ValueError("its end is missing")
        return np.frombuffer(part, dtype).reshape(shape).copy()

    try:
        (size,) = _LENGTH.unpack(body[: _LENGTH.size])
        head, arrays = (
            body[_LENGTH.size : _LENGTH.size + size],
            body[_LENGTH.size + size :],
        )
        if len(head) != size:
            raise ValueError("its end is missing")
        return json.loads(bytes(head), object_hook=array)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise MessageError(f"message: cannot be read: {error}") from error


def write_news(news: News) -> Any:
    """The news of a sampler as a value for `pack`."""
    return {**news._asdict(), "progress": [_progress_out(p) for p in news.progress]}


def read_news(value: Any) -> News:
    """Reads what `write_news` wrote.

    Raises:
        MessageError: the value is no news.
    """

    def read() -> News:
        return News(
            int(value["number"]),
            str(value["doing"]),
            tuple(map(str, value["ready"])),
            {str(k): str(v) for k, v in value["refused"].items()},
            [_progress_in(each) for each in value["progress"]],
        )

    return _checked(read, "news")


def write_orders(orders: list[tuple[int, Order]]) -> Any:
    """Orders with their numbers as a value for `pack`."""
    return [[number, _order_out(order)] for number, order in orders]


def read_orders(value: Any) -> list[tuple[int, Order]]:
    """Reads what `write_orders` wrote.

    Raises:
        MessageError: the value holds no orders.
    """
    return _checked(lambda: [(int(n), _order_in(o)) for n, o in value], "orders")


def why_not_elsewhere(request: Request) -> str | None:
    """Says why another process cannot sample a request; None if it can."""
    if request.constrain is not None:
        return "has a grammar, which only the trainer's own sampler has"
    if request.sampling.prompt_scores:
        return "asks for the log-probs of its prompt"
    return None


def _checked[Value](read: Callable[[], Value], name: str) -> Value:
    try:
        return read()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise MessageError(
            f"{name}: cannot be read: {type(error).__name__}: {error}; is the other "
            "side of another version?"
        ) from error


def _progress_out(progress: Progress) -> dict[str, Any]:
    tokens, others = progress.tokens, progress.alternatives
    version = int(tokens.versions[0]) if len(tokens) else -1
    return {
        **progress._asdict(),
        "tokens": {
            "ids": tokens.ids,
            "logprobs": tokens.logprobs,
            "log_masses": tokens.log_masses,
            "version": version,
            "kept": tokens.kept,
        },
        "alternatives": None if others is None else [others.ids, others.logprobs],
    }


def _progress_in(value: Mapping[str, Any]) -> Progress:
    tokens, others = value["tokens"], value["alternatives"]
    reason = value["finish_reason"]
    if reason not in (None, "stop", "stop_string", "length", "cancelled", "failed"):
        raise ValueError(f"finish_reason {reason!r}")
    return Progress(
        int(value["lease"]),
        int(value["index"]),
        int(value["start"]),
        Tokens.generated(
            _array(tokens["ids"], np.int32),
            _array(tokens["logprobs"], np.float32),
            version=int(tokens["version"]),
            log_masses=_array(tokens["log_masses"], np.float32),
            kept=_array(tokens["kept"], np.int32),
        ),
        None
        if others is None
        else Alternatives(_array(others[0], np.int32), _array(others[1], np.float32)),
        reason,
        str(value["error"]),
        bool(value["refused"]),
    )


def _array(value: Any, dtype: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise TypeError(f"an array of {np.dtype(dtype).name} is missing")
    return value


def _order_out(order: Order) -> dict[str, Any]:
    if isinstance(order, Revoke):
        return {"revoke": [order.lease, order.samples]}
    request = dataclasses.asdict(order.request)
    del request["constrain"]
    request["prompt"] = np.array(order.request.prompt, np.int32)
    return {"grant": [order.lease, order.policy, order.job, request]}


def _order_in(value: Mapping[str, Any]) -> Order:
    if "revoke" in value:
        lease, samples = value["revoke"]
        return Revoke(int(lease), tuple(map(int, samples)))
    lease, (version, digest), job, given = value["grant"]
    prompt = tuple(_array(given["prompt"], np.int32).tolist())
    sampling = SamplingParams(**{k: _tuple(v) for k, v in given["sampling"].items()})
    request = Request(**{**given, "prompt": prompt, "sampling": sampling})
    return Grant(int(lease), Policy(int(version), str(digest)), int(job), request)


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
