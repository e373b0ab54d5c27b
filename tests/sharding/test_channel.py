"""Processes exchange values, and each learns who is late, gone or different."""

import contextlib
import json
import re
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from jaxrl_post.frames import send_frame
from jaxrl_post.sharding.channel import Channel, ProcessesError, gather, join

SOON = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch):
    # The others of these tests do not end when they are told to.
    monkeypatch.setattr("jaxrl_post.sharding.channel._LAST_FRAMES_S", 1.0)


class Group:
    """Channels of so many processes, all of them in this one."""

    def __init__(self, count: int, *, silence_s: float = 45.0):
        self.ends: list[Future[tuple[str, str]]] = [Future() for _ in range(count)]
        address = "127.0.0.1", free_port()
        self.pool = ThreadPoolExecutor(count)

        def make(index: int) -> Channel:
            def on_end(*why):
                self.ends[index].set_result(why)

            if index == 0:
                channel, self.clocks = gather(
                    address, count, lambda: {"port": 7}, on_end,
                    deadline_s=SOON, silence_s=silence_s,
                )  # fmt: skip
                return channel
            channel, greeting = join(
                address, count, index, on_end, deadline_s=SOON, silence_s=silence_s
            )
            assert greeting["port"] == 7
            return channel

        self.channels = list(self.pool.map(make, range(count)))

    def each(self, function):
        """Calls a function of (index, channel) in all of them at the same time."""
        calls = [self.pool.submit(function, *pair) for pair in enumerate(self.channels)]
        return [call.result(timeout=SOON) for call in calls]

    def close(self):
        with contextlib.suppress(RuntimeError):
            self.each(lambda _, channel: channel.close())
        self.pool.shutdown()


@pytest.fixture
def group():
    made = []

    def make(*args, **kwargs):
        made.append(Group(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_everyone_gets_all_values_in_the_order_of_the_indices(group):
    three = group(3)

    def several(index, channel):
        found = []
        for number in range(20):
            # The last may come first.
            time.sleep(0.002 * ((index + number) % 3))
            value = {"index": index, "reward": 0.1 * index, "number": number}
            found.append(channel.exchange("judgements", value, deadline_s=SOON))
        return found

    expected = [
        [{"index": i, "reward": 0.1 * i, "number": number} for i in range(3)]
        for number in range(20)
    ]
    assert three.each(several) == [expected] * 3
    assert all(abs(ahead) < 30 for ahead in three.clocks.values())


def test_a_value_may_be_large(group):
    text = "x" * 5_000_000
    found = group(2).each(lambda i, c: c.exchange("text", text + str(i), deadline_s=60))
    assert found == [[text + "0", text + "1"]] * 2


def test_the_late_one_is_named_with_the_exchange_and_the_time(group):
    three = group(3)
    late = r"answers: process 2 \(host .*, pid \d+\) did not come within 0.3 s"
    calls = [
        three.pool.submit(channel.exchange, "answers", None, deadline_s=0.3)
        for channel in three.channels[:2]
    ]
    with pytest.raises(ProcessesError, match=late) as told:
        calls[0].result(timeout=SOON)
    # Process 0 has not failed yet in the eyes of process 1: it says why it does.
    three.channels[0].fail(str(told.value))
    for index in (1, 2):
        reason, message = three.ends[index].result(timeout=SOON)
        assert reason == "failed"
        assert re.match(rf"process 0 \(host .*\) failed: {late}", message)


def test_two_that_are_at_different_exchanges_are_told_apart(group):
    two = group(2)
    two.pool.submit(two.channels[1].exchange, "stop", None, deadline_s=0.1)
    with pytest.raises(
        ProcessesError,
        match=r"process 1 .* is at the exchange of 'stop', number 1, and process 0 at "
        "'judgements', number 1: they do not run the same program",
    ):
        two.channels[0].exchange("judgements", None, deadline_s=SOON)


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_all_others_learn_who_died(group, dead):
    three = group(3)
    # A process that was killed says nothing more, and the kernel closes its sockets.
    three.channels[dead]._closing.set()
    for link in three.channels[dead]._links.values():
        with contextlib.suppress(OSError):
            link._reader.shutdown(socket.SHUT_RDWR)
    for index in {0, 1, 2} - {dead}:
        reason, message = three.ends[index].result(timeout=SOON)
        assert reason == "gone"
        assert re.match(
            rf"process {dead} \(host .*, pid \d+\) is gone: its connection closed",
            message,
        )


def test_one_that_is_silent_is_gone(group, monkeypatch):
    monkeypatch.setattr("jaxrl_post.sharding.channel._BEAT_S", 60.0)
    two = group(2, silence_s=0.5)
    for number, other in ((0, 1), (1, 0)):
        reason, message = two.ends[number].result(timeout=SOON)
        assert reason == "gone"
        # Either may notice first, and process 0 tells what it noticed.
        assert re.match(
            rf"process ({number}|{other}) .* (was not heard for 0.5 s|is gone)", message
        )


def test_beats_keep_a_silent_exchange_alive(group, monkeypatch):
    monkeypatch.setattr("jaxrl_post.sharding.channel._BEAT_S", 0.05)
    two = group(2, silence_s=4.0)
    time.sleep(6.0)
    assert two.each(lambda i, c: c.exchange("late", i, deadline_s=SOON)) == [[0, 1]] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_anywhere_is_an_error_everywhere(group, failing):
    three = group(3)
    three.channels[failing].fail("the disk is full")
    for index in {0, 1, 2} - {failing}:
        reason, message = three.ends[index].result(timeout=SOON)
        assert reason == "failed"
        assert re.match(
            rf"process {failing} \(host .*\) failed: the disk is full", message
        )
    assert not three.ends[failing].done()


def test_a_normal_end_is_not_a_death(group):
    three = group(3)
    three.each(lambda _, channel: channel.close())
    assert not any(end.done() for end in three.ends)


def never(*why):
    raise AssertionError(why)


def test_process_0_says_who_did_not_come():
    address = "127.0.0.1", free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gather, address, 4, dict, never, deadline_s=1.0)
        second = pool.submit(join, address, 4, 2, never, deadline_s=SOON)
        # The one that came is told, and does not wait any longer.
        for call in (first, second):
            with pytest.raises(
                ProcessesError,
                match=r"start: process 1, 3 of 4 did not connect to process 0 within 1 "
                r"s\. Was it started",
            ):
                call.result(timeout=SOON)


def test_a_port_in_use_is_refused_with_its_number():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ProcessesError,
            match=rf"cannot listen on port {port}: Address already in use\. Choose",
        ):
            gather(("127.0.0.1", port), 2, dict, never, deadline_s=SOON)


def test_a_coordinator_that_is_not_there_is_named():
    port = free_port()
    begin = time.monotonic()
    with pytest.raises(
        ProcessesError,
        match=rf"no process 0 answered at 127\.0\.0\.1:{port} within 0.6 s \(.*refused",
    ):
        join(("127.0.0.1", port), 2, 1, never, deadline_s=0.6)
    assert time.monotonic() - begin < SOON


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((3, 1), r"process 1 .* was started with --processes.count 3, and .* with 4"),
        ((4, 1), r"process 1 .* and process 1 .* have the same --processes.index"),
    ],
)
def test_processes_that_contradict_each_other_are_refused(second, message):
    address = "127.0.0.1", free_port()
    with ThreadPoolExecutor() as pool:
        zero = pool.submit(gather, address, 4, dict, never, deadline_s=SOON)
        # Which of the two comes first is open, and only one of them if it is refused.
        others = [
            pool.submit(join, address, count, index, never, deadline_s=3.0)
            for count, index in ((4, 1), second)
        ]
        with pytest.raises(ProcessesError, match=message):
            zero.result(timeout=SOON)
        told = [str(other.exception(timeout=SOON)) for other in others]
        assert any(re.search(message, each) for each in told)


def test_strangers_do_not_disturb():
    address = "127.0.0.1", free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(gather, address, 2, dict, never, deadline_s=SOON)
        for hello in (None, b"GET / HTTP/1.1\r\n\r\n", {"index": "one"}):
            with _connected(address) as stranger:
                if isinstance(hello, bytes):
                    stranger.sendall(hello)
                elif hello is not None:
                    send_frame(
                        stranger,
                        json.dumps(hello).encode(),
                        expires=time.monotonic() + 5,
                    )
        second = pool.submit(join, address, 2, 1, never, deadline_s=SOON)
        channels = [first.result(timeout=SOON)[0], second.result(timeout=SOON)[0]]
        closing = [threading.Thread(target=each.close) for each in channels]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(SOON)


def _connected(address):
    deadline = time.monotonic() + SOON
    while True:
        try:
            return socket.create_connection(address, timeout=SOON)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_threads_exchange_in_lanes_of_their_own(group):
    """One thread's exchanges do not wait for another's, in any process."""
    made, behind = group(3), threading.Event()

    def slow(index, channel):
        found = [channel.exchange("a", [index, 0], deadline_s=SOON)]
        if not index:
            # The other lane is done before this one continues.
            assert behind.wait(SOON)
        return [*found, channel.exchange("a", [index, 1], deadline_s=SOON)]

    def fast(index, channel):
        return [
            channel.exchange(f"b{i}", index * i, deadline_s=SOON, lane="samplers")
            for i in range(20)
        ]

    with ThreadPoolExecutor(6) as pool:
        calls = [
            [pool.submit(work, *pair) for pair in enumerate(made.channels)]
            for work in (slow, fast)
        ]
        fasts = [call.result(SOON) for call in calls[1]]
        behind.set()
        slows = [call.result(SOON) for call in calls[0]]
    assert fasts == [[[0, i, 2 * i] for i in range(20)]] * 3
    assert slows == [[[[n, step] for n in range(3)] for step in (0, 1)]] * 3
