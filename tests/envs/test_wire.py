import json
import socket
import threading
import time

import pytest

from jaxrl_post.envs import Message, Step
from jaxrl_post.envs.workers import wire
from jaxrl_post.envs.workers.wire import decode_step, encode_step, receive_reply
from jaxrl_post.frames import receive_frame, send_frame
from jaxrl_post.messages import PICTURE


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("size", [0, 1, 65_536, 5_000_000])
def test_frames_of_any_size_arrive_whole(pair, size):
    ours, theirs = pair
    payload = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    sender = threading.Thread(
        target=send_frame, args=(ours, payload), kwargs={"expires": soon()}
    )
    sender.start()
    assert receive_frame(theirs, expires=soon()) == payload
    sender.join(60.0)


def test_every_wait_ends(pair):
    ours, theirs = pair
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        receive_frame(theirs, expires=soon(0.1))
    # Half a frame does not extend the deadline, and a reader that stopped ends a write.
    ours.sendall((100).to_bytes(8) + b"half")
    with pytest.raises(TimeoutError):
        receive_frame(theirs, expires=soon(0.1))
    with pytest.raises(TimeoutError):
        send_frame(ours, b"x" * 10_000_000, expires=soon(0.1))
    with pytest.raises(TimeoutError):
        send_frame(ours, b"late", expires=time.monotonic())
    assert time.monotonic() - began < 30.0


def test_the_end_of_the_other_side_is_an_end(pair):
    ours, theirs = pair
    ours.sendall((100).to_bytes(8) + b"half")
    ours.close()
    with pytest.raises(EOFError):
        receive_frame(theirs, expires=soon())


def test_a_frame_over_the_limit_is_refused_before_memory_is_taken(pair):
    ours, theirs = pair
    ours.sendall((2**62).to_bytes(8))
    with pytest.raises(ValueError, match=f"at most 268435456 bytes, got {2**62}"):
        receive_frame(theirs, expires=soon())


@pytest.mark.parametrize(
    "reply", [b"", b"[1]", b"{}", b'{"kind": 3}', b"\xff", b"[" * 100_000]
)
def test_what_is_no_reply_is_refused(pair, reply):
    ours, theirs = pair
    send_frame(ours, reply, expires=soon())
    with pytest.raises(ValueError, match=r"reply must|Expecting value|decode"):
        receive_reply(theirs, expires=soon())


def test_steps_survive_exactly():
    step = Step(
        reward=0.1 + 0.2,
        done=False,
        messages=(Message("tool", "é \ud800 \0 ∞"),),
        metrics={"tiny": 5e-324, "minus zero": -0.0},
    )
    assert decode_step(encode_step(step)) == step
    assert str(decode_step(encode_step(step)).metrics["minus zero"]) == "-0.0"


def test_pictures_of_a_step_arrive():
    message = Message("tool", f"{PICTURE} and {PICTURE}", pictures=(b"\0\xff", b"GIF"))
    step = Step(0.0, done=False, messages=(message,))
    assert decode_step(json.loads(json.dumps(encode_step(step)))) == step


def test_pictures_of_a_step_have_a_largest_size(monkeypatch):
    monkeypatch.setattr(wire, "LARGEST_PICTURES", 5)
    message = Message("user", PICTURE, pictures=(b"abc",))
    encode_step(Step(0.0, done=False, messages=(message,)))
    with pytest.raises(ValueError, match="at most 5 bytes together, got 6"):
        encode_step(Step(0.0, done=False, messages=(message, message)))


@pytest.mark.parametrize("bad", [["no base64"], "R0lG", [3], ["R0lG", "R0lG"]])
def test_bad_pictures_of_a_reply_are_refused(bad):
    """A worker runs code for a model's text, so its replies are not trusted."""
    fields = encode_step(Step(0.0, done=False, messages=(Message("user", PICTURE),)))
    fields["messages"][0]["pictures"] = bad
    with pytest.raises((ValueError, TypeError)):
        decode_step(fields)
