"""A judgement is stopped by the processor time that it takes, not by the clock."""

import contextlib
import gc
import signal
import sys
import threading
import time
import weakref

import pytest

from jaxrl_post.envs.processor_time import processor_time


def loop():
    while True:
        pass


def test_the_clock_does_not_count():
    with processor_time(0.1, "waiting"):
        time.sleep(0.5)


def test_processor_time_does():
    told = r"^adding took more than 0\.1 s of processor time"
    with pytest.raises(TimeoutError, match=told), processor_time(0.1, "adding"):
        loop()


def test_code_that_takes_the_stop_for_an_answer_has_failed_all_the_same():
    def swallowed():
        with contextlib.suppress(BaseException):
            loop()

    with pytest.raises(TimeoutError), processor_time(0.1, "scoring"):
        swallowed()

    def translated():
        try:
            loop()
        except BaseException as error:
            raise ValueError("no answer") from error

    with pytest.raises(TimeoutError), processor_time(0.1, "scoring"):
        translated()


def test_what_the_code_raises_in_time_is_its_own():
    with pytest.raises(ZeroDivisionError), processor_time(10.0, "dividing"):
        _ = 1 / 0


def test_nothing_is_left_behind():
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TimeoutError), processor_time(0.05, "looping"):
        loop()
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def _work(*_):
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass


def _in_a_finalizer():
    class Slow:
        def __del__(self):
            _work()

    Slow()


def _in_a_weak_reference():
    class Referent:
        pass

    referent = Referent()
    reference = weakref.ref(referent, _work)
    del referent
    assert reference() is None


def _in_the_garbage_collector():
    gc.callbacks.append(_work)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(_work)


@pytest.mark.parametrize(
    "lose", [_in_a_finalizer, _in_a_weak_reference, _in_the_garbage_collector]
)
def test_a_stop_where_exceptions_are_lost_comes_again(lose):
    """An exception there would only be printed, which is an error in these tests."""

    def judged():
        lose()
        loop()

    with pytest.raises(TimeoutError), processor_time(0.05, "judging"):
        judged()


def test_other_lost_exceptions_are_still_told(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(lost.exc_type))
    hook = sys.unraisablehook

    class Broken:
        def __del__(self):
            raise ZeroDivisionError

    with processor_time(10.0, "judging"):
        Broken()
    assert told == [ZeroDivisionError]
    assert sys.unraisablehook is hook


def test_another_thread_has_no_limit():
    done = []

    def work():
        with processor_time(1e-6, "adding"):
            done.append(sum(range(100_000)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [4999950000]
