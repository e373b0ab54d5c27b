"""Messages: what is written is read to the last bit, and what is broken is refused."""

import json
import math
import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest

from jaxrl_post.fleet.orders import Grant, News, PolicyVersion, Progress, Revoke
from jaxrl_post.fleet.wire import (
    MessageError,
    pack,
    read_news,
    read_orders,
    unpack,
    why_not_elsewhere,
    write_news,
    write_orders,
)
from jaxrl_post.pictures import PictureProcessor, number
from jaxrl_post.sampler.requests import (
    MOST_ALTERNATIVES,
    Alternatives,
    Request,
    SamplingParams,
)
from jaxrl_post.tokens import Tokens

ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, -1.5, 1e-45, 3.4e38]


def through(news: News) -> News:
    return read_news(unpack(pack(write_news(news))))


def ordered(orders: list) -> list:
    return read_orders(unpack(pack(write_orders(orders))))


def bits(value: Any) -> Any:
    """A value in which equal means equal bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, Tokens):
        return {name: bits(array) for name, array in vars(value).items()}
    if isinstance(value, float):
        return struct.pack("!d", value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: bits(item) for name, item in vars(value).items()}
    return value


def some_news(draw: random.Random) -> News:
    """News of up to nine samples."""
    progress, recorded = [], draw.random() < 0.5
    for _ in range(draw.randrange(10)):
        count, most = draw.choice((0, 1, 2, 8)), draw.choice((0, 0, 1, 4))
        kept = np.array([[draw.randrange(99) for _ in range(most)]] * count, np.int32)
        kept = kept.reshape(count, most)
        kept[: count // 2, most // 2 :] = -1
        tokens = Tokens.generated(
            [draw.randrange(2**31) for _ in range(count)],
            [draw.choice(ODD) for _ in range(count)],
            version=draw.randrange(2**31),
            log_masses=[draw.choice(ODD[: draw.choice((1, 8))]) for _ in range(count)],
            kept=kept,
            experts=np.full((count, 3, 2), draw.randrange(9)) if recorded else None,
        )
        if recorded and count:
            lead = np.arange(6 * draw.randrange(4), dtype=np.int16)
            if lead.size:
                tokens = tokens.led_by(lead.reshape(-1, 3, 2))
        others = None
        if draw.random() < 0.3:
            ids = np.arange(count * MOST_ALTERNATIVES, dtype=np.int32)
            ids = ids.reshape(count, MOST_ALTERNATIVES)
            others = Alternatives(ids, ids.astype(np.float32) * np.float32(-0.0))
        reason = draw.choice(
            (None, None, "stop", "stop_string", "length", "cancelled", "failed")
        )
        error = draw.choice(("", "", 'no "end" \ud800 ä'))
        refused = draw.random() < 0.2
        place = draw.randrange(2**60), draw.randrange(2**32), draw.randrange(2**31)
        progress.append(Progress(*place, tokens, others, reason, error, refused))
    names = tuple(f"d{k}" for k in range(draw.randrange(3)))
    refused = dict.fromkeys(draw.sample(("", "@", "d1"), draw.randrange(3)), "why")
    probed = {name: draw.random() for name in names}
    number, doing = draw.randrange(2**40), draw.choice(("", "é"))
    return News(number, doing, names, refused, progress, probed)


def some_orders(draw: random.Random) -> list:
    """Up to five orders."""
    found = list[tuple[int, Any]]()
    for _ in range(draw.randrange(6)):
        if draw.random() < 0.4:
            indices = [draw.randrange(2**32) for _ in range(draw.choice((0, 1, 20)))]
            found.append(
                (draw.randrange(2**50), Revoke(draw.randrange(2**60), tuple(indices)))
            )
            continue
        sampling = SamplingParams(
            temperature=draw.choice((0.0, -0.0, 1.0, 1e-300)),
            top_k=draw.choice((0, 2**31 - 1)),
            top_p=draw.choice((1.0, 0.1)),
            max_tokens=draw.choice((1, 2**40)),
            stop_ids=tuple(range(draw.choice((0, 3, 9, 30)))),
            stop_strings=draw.choice(((), ("a", "\n\ud800"))),
            alternatives=draw.random() < 0.5,
            bad_words=draw.choice(((), ((1,), (2, 3)), (tuple(range(20)),))),
            logit_bias=draw.choice(((), ((5, math.nan), (2**31, -0.0), (7, 1e300)))),
            frequency_penalty=draw.choice((0.0, -0.0, -2.5)),
        )
        size = draw.choice((1, 2, 9, 300))
        request = Request(
            draw.randrange(2**32),
            tuple(draw.randrange(2**31) for _ in range(size)),
            num_samples=draw.choice((1, 7)),
            first_sample=draw.choice((0, 2**32 - 7)),
            sampling=sampling,
            num_sampled=draw.choice((0, size - 1)),
            noise_id=draw.choice((None, 0, 2**32 - 1)),
        )
        policy = PolicyVersion(draw.randrange(2**31), draw.choice(("d", "@", "")))
        grant = Grant(draw.randrange(2**60), policy, draw.randrange(99), request)
        found.append((draw.randrange(2**50), grant))
    return found


def test_messages_that_are_small_by_hand():
    news = News(3, "sampling", ("d1",), {"d2": "it is wrong"}, ())
    assert write_news(news) == {
        "number": 3,
        "doing": "sampling",
        "ready": ("d1",),
        "refused": [("d2", "it is wrong")],
        "progress": None,
        "probed": [],
    }
    assert through(news) == news._replace(progress=[])
    assert write_orders([(1, Revoke(2, (3, 4)))]) == [[1, "Revoke", [2, [3, 4]]]]
    data = pack({"a": np.array([[1, 2]], np.int32), "b": [None, 1.5]})
    head = b'{"a":{"@":["int32",[1,2]]},"b":[null,1.5]}'
    assert data == struct.pack("!I", len(head)) + head + struct.pack("<2i", 1, 2)


@pytest.mark.parametrize("block", range(4))
def test_news_and_orders_are_read_to_the_last_bit(block: int):
    for seed in range(100 * block, 100 * block + 100):
        draw = random.Random(seed)
        news, orders = some_news(draw), some_orders(draw)
        found = through(news)
        assert bits(found) == bits(news), f"news {seed}"
        assert all(
            each.tokens == e.tokens
            for each, e in zip(found.progress, news.progress, strict=True)
        )
        assert bits(ordered(orders)) == bits(orders), f"orders {seed}"


def test_a_token_takes_few_bytes():
    """Ids and log-probs are 8 bytes; what a sample adds to each news, 40."""
    tokens = Tokens.generated(range(8), [-0.5] * 8, version=3)
    lease = 2**48
    progress = [Progress(lease + k, 3, 800, tokens) for k in range(256)]
    size = len(pack(write_news(News(7, "sampling", ("d" * 64,), {}, progress))))
    assert size / (256 * 8) < 13.3


def test_what_a_message_does_not_hold_is_refused_when_it_is_written():
    for value in ({1}, np.zeros(2), np.zeros(2, np.bool_), object()):
        with pytest.raises(TypeError, match=type(value).__name__):
            pack({"a": value})
    mixed = Tokens.generated([1], [0.0], version=1) + Tokens.generated(
        [2], [0.0], version=2
    )
    with pytest.raises(ValueError, match="of one version"):
        write_news(News(1, progress=[Progress(1, 0, 0, mixed)]))


def test_who_samples_what_has_a_grammar_or_scores():
    assert why_not_elsewhere(Request(1, (1,))) is None
    grammar = Request(1, (1,), constrain=lambda: None)
    assert "grammar" in str(why_not_elsewhere(grammar))
    scored = SamplingParams(prompt_scores=True)
    assert "log-probs" in str(why_not_elsewhere(Request(1, (1,), sampling=scored)))
    processor = PictureProcessor(patch_size=2, min_pixels=16)
    picture = number(np.zeros((4, 4, 3), np.uint8), processor)
    assert "pictures" in str(why_not_elsewhere(Request(1, (*picture.ids, 1))))


@pytest.mark.parametrize(
    ("head", "arrays", "why"),
    [
        ("{", b"", "Expecting"),
        ('{"@":["int32",[2]]}', b"1234", "its end is missing"),
        ("[]", b"1", "1 bytes are too many"),
        ('{"@":["int32",[-1]]}', b"", "shape"),
        ('{"@":["int32",[true]]}', b"1234", "shape"),
        ('{"@":["int32",[0,99999999999]]}', b"", "shape"),
        ('{"@":["object",[1]]}', b"12345678", "object"),
        ('{"@":["int32"]}', b"", "unpack"),
        ('{"@":7}', b"", "unpack"),
        ("[" * 100_000, b"", "RecursionError"),
        ("9" * 5000, b"", "4300"),
        (
            "\ud800".encode("utf-16-le", "surrogatepass").decode("latin1"),
            b"",
            "message",
        ),
    ],
)
def test_messages_that_are_none(head: str, arrays: bytes, why: str):
    data = head.encode("latin1")
    with pytest.raises(MessageError, match=why):
        unpack(struct.pack("!I", len(data)) + data + arrays)


@pytest.mark.parametrize("data", [b"", b"\0\0", b"\0\0\0\5{}", b"\xff" * 12])
def test_messages_that_have_no_end(data: bytes):
    with pytest.raises(MessageError):
        unpack(data)


def test_arrays_take_no_more_memory_than_the_message():
    """Each array has bytes of its own: a megabyte cannot be read a thousand times."""
    head = json.dumps([{"@": ["int32", [250_000]]}] * 1000).encode()
    data = struct.pack("!I", len(head)) + head + bytes(1_000_000)
    tracemalloc.start()
    with pytest.raises(MessageError, match="its end is missing"):
        unpack(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


def test_counts_that_overflow_are_refused():
    tokens = Tokens.generated([1, 2], [0.0, 0.0], version=1)
    news = News(1, progress=[Progress(1, 0, 0, tokens)] * 4)
    value = unpack(pack(write_news(news)))
    rows = value["progress"]["rows"]
    for counts in ([2**62] * 4, [2**63 - 1, 1, 2, 2], [-2, 6, 2, 2], [8, 2, 2, 2]):
        rows[:, 3] = counts
        with pytest.raises(MessageError, match="others are counted"):
            read_news(value)


def test_experts_that_do_not_fit_are_refused():
    chosen = np.zeros((2, 3, 2), np.int16)
    tokens = Tokens.generated([1, 2], [0.0, 0.0], version=1, experts=chosen)
    news = News(1, progress=[Progress(1, 0, 0, tokens.led_by(chosen))])

    def changed(**columns: Any) -> Any:
        value = unpack(pack(write_news(news)))
        value["progress"] |= columns
        return value

    assert read_news(changed()).progress[0].tokens.lead.shape == (2, 3, 2)
    for columns, why in (
        ({"led": [[0, 1]]}, "2 rows of experts are there"),
        ({"led": [[0, 3], [0, -1]]}, "2 rows of experts are there"),
        ({"led": [[1, 2]]}, "cannot be read"),
        ({"lead": np.zeros((2, 3, 4), np.int16)}, r"\(3, 4\) .* answer's are \(3, 2\)"),
        ({"lead": np.zeros((2, 3), np.int16)}, "int16 is missing"),
        ({"experts": np.zeros((3, 3, 2), np.int16)}, "equal length"),
    ):
        with pytest.raises(MessageError, match=why):
            read_news(changed(**columns))


def mutated(draw: random.Random, whole: bytes) -> bytes:
    """A message with a few bytes changed, cut out, doubled, or swapped in its JSON."""
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        size = draw.choice((1, 1, 4, 40))
        match draw.randrange(5):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case 3:
                del data[at:]
            case 4:
                # Another kind of value.
                value = draw.choice(
                    (b"null", b"-1", b"1e999", b"[]", b"{}", b'"x"', b"true", b"9" * 30)
                )
                places = [i for i, byte in enumerate(data[4:]) if byte in b",:["]
                if places:
                    begin = 5 + draw.choice(places)
                    end = begin
                    while end < len(data) and data[end] not in b",]}":
                        end += 1
                    data[begin:end] = value
                    (head,) = struct.unpack("!I", data[:4])
                    head = max(0, head + len(value) - (end - begin))
                    data[:4] = struct.pack("!I", head & 0xFFFFFFFF)
    return bytes(data)


@pytest.mark.parametrize("block", range(4))
def test_a_message_that_was_changed_is_read_or_refused(block: int):
    outcomes = [0, 0]
    for seed in range(600 * block, 600 * block + 600):
        draw = random.Random(seed)
        news = seed % 2
        value = write_news(some_news(draw)) if news else write_orders(some_orders(draw))
        data = pack(value)
        for _ in range(4):
            try:
                found = unpack(mutated(draw, data))
                (read_news if news else read_orders)(found)
                outcomes[0] += 1
            except MessageError:
                outcomes[1] += 1
    assert min(outcomes) > 100


@pytest.mark.parametrize("block", range(2))
def test_a_value_of_another_kind_is_read_or_refused(block: int):
    """Any part of a message may be anything that a message can hold."""
    others = (
        *(None, True, -1, 2**70, 1.5, math.nan, math.inf, "x", [], {}, [[]]),
        *(np.zeros(0, np.int32), np.ones(1, np.int32), np.ones((2, 2), np.float32)),
        *({"@": 1}, ["Grant"], np.zeros((3, 5), np.int64), np.ones((1, 5), np.int64)),
    )
    refused = 0
    for seed in range(1500 * block, 1500 * block + 1500):
        draw = random.Random(seed)
        news = seed % 2
        value = write_news(some_news(draw)) if news else write_orders(some_orders(draw))
        value = unpack(pack(value))
        places = list(_places(value))
        if not places:
            continue
        holder, key = draw.choice(places)
        holder[key] = draw.choice(others)
        try:
            (read_news if news else read_orders)(value)
        except MessageError:
            refused += 1
    assert refused > 300


def _places(value: Any):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)
