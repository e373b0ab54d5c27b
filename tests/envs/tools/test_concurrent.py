"""Calls of a turn at the same time: counted in flight, never by the clock."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from jaxrl_post.envs.servers import Retries, ServerError, UnreachableError
from jaxrl_post.envs.tools import (
    Endpoint,
    Functions,
    Search,
    Tool,
    ToolEnvironment,
    ToolError,
    make_toolset,
)
from tests.envs.tools.http_servers import serving
from tests.envs.tools.test_environment import Sums, calls

# Seconds after which calls that should meet have not.
LONGEST = 20.0


@dataclass
class Flight:
    """Counts calls that are running; `meet` ends when so many are."""

    parties: int = 1
    most: int = 0
    begun: list = field(default_factory=list)
    ended: list = field(default_factory=list)

    def __post_init__(self):
        self.lock = threading.Lock()
        self.barrier = threading.Barrier(self.parties)
        self.changed = threading.Condition(self.lock)

    def tools(self):
        names = {"meet": True, "last_first": True, "alone": False, "fail": True}
        names |= {"lose": True}
        return [Tool(name, "", concurrent=each) for name, each in names.items()]

    def open(self, task):
        return self

    def call(self, name, arguments):
        with self.lock:
            self.begun.append((name, *arguments.values()))
            self.most = max(self.most, len(self.begun) - len(self.ended))
        try:
            return getattr(self, name)(**arguments)
        finally:
            with self.changed:
                self.ended.append((name, *arguments.values()))
                self.changed.notify_all()

    def meet(self, at=0):
        self.barrier.wait(LONGEST)
        return f"met {at}"

    def last_first(self, at, of):
        """Ends after the calls behind it."""
        behind = [("last_first", each, of) for each in range(at + 1, of)]
        with self.changed:
            assert self.changed.wait_for(
                lambda: all(each in self.ended for each in behind), LONGEST
            )
        return f"number {at}"

    def alone(self, at=0):
        with self.lock:
            return f"{len(self.begun) - len(self.ended)} under way"

    def fail(self, how):
        self.barrier.wait(LONGEST)
        if how == "told":
            raise ToolError("no", kind="bad_arguments")
        raise ValueError("broken")

    def lose(self):
        self.barrier.wait(LONGEST)
        raise ServerError("it is gone")

    def close(self):
        pass


def taken(tools, *wanted, **options):
    environment = ToolEnvironment(Sums(), (tools,), **options)
    (task, *_) = environment.tasks("train")
    session = environment.open(task)
    try:
        return session.step(calls(*wanted))
    finally:
        session.close()


def said(step) -> list[str]:
    return [message.content for message in step.messages]


def test_calls_are_under_way_together_and_answered_in_order():
    flight = Flight()
    step = taken(flight, *(("last_first", {"at": at, "of": 4}) for at in range(4)))
    assert said(step) == [f"number {at}" for at in range(4)]
    assert [message.tool_call_id for message in step.messages] == [
        f"{place:09d}" for place in range(4)
    ]
    assert [at for _, at, _ in flight.ended] == [3, 2, 1, 0]
    assert step.metrics["tools/calls"] == 4.0


def test_a_call_that_is_not_concurrent_waits_and_is_waited_for():
    flight = Flight(parties=2)
    step = taken(
        flight,
        *(("meet", {"at": 0}), ("meet", {"at": 1}), ("alone", {"at": 2})),
        *(("alone", {"at": 3}), ("meet", {"at": 4}), ("meet", {"at": 5})),
    )
    one = "1 under way"
    assert said(step) == ["met 0", "met 1", one, one, "met 4", "met 5"]
    assert flight.most == 2
    assert {at for _, at in flight.ended[:2]} == {0, 1}
    assert [at for _, at in flight.ended[2:4]] == [2, 3]


def test_a_call_that_is_refused_holds_nobody_up():
    flight = Flight(parties=2)
    step = taken(flight, ("meet", {}), ("nothing", {}), ("meet", {}))
    assert said(step)[::2] == ["met 0", "met 0"]
    assert said(step)[1].startswith("error: there is no tool 'nothing'")


def test_a_call_that_fails_fails_alone():
    flight = Flight(parties=4)
    step = taken(
        flight,
        *(("meet", {"at": 0}), ("fail", {"how": "told"})),
        *(("fail", {"how": "raised"}), ("meet", {"at": 3})),
    )
    assert said(step) == ["met 0", "error: no", "error: ValueError: broken", "met 3"]
    assert step.metrics["tools/failed"] == 2.0
    assert step.metrics["tools/errors/bad_arguments"] == 1.0
    assert step.metrics["tools/errors/tool_failed"] == 1.0


def test_a_server_that_is_gone_fails_the_episode_when_no_call_is_under_way():
    flight = Flight(parties=3)
    with pytest.raises(ServerError, match="it is gone"):
        taken(flight, ("meet", {"at": 0}), ("lose", {}), ("meet", {"at": 2}))
    assert len(flight.ended) == 3


def test_calls_stay_bounded_in_number_and_time():
    flight = Flight(parties=2)
    step = taken(flight, *(("meet", {"at": at}) for at in range(4)), max_calls=2)
    assert said(step)[:2] == ["met 0", "met 1"]
    assert step.metrics["tools/errors/too_many"] == 2.0
    flight = Flight()
    step = taken(flight, ("meet", {}), ("meet", {}), turn_seconds=-1.0)
    assert step.metrics["tools/errors/too_late"] == 2.0
    assert flight.begun == []


@pytest.mark.parametrize("concurrent", [True, False])
def test_an_endpoint_has_all_calls_of_a_turn_if_it_may(concurrent):
    flight = Flight(parties=8 if concurrent else 1)

    def answer(handler, name, arguments):
        return 200, flight.call(name, arguments)

    with serving(answer) as server:
        tools = Endpoint(server.url, (Tool("meet", ""),), LONGEST, concurrent)
        step = taken(tools, *(("meet", {"at": at}) for at in range(8)))
    assert said(step) == [f"met {at}" for at in range(8)]
    assert flight.most == (8 if concurrent else 1)


def test_who_says_that_calls_may_be_concurrent(tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"name": "look"}]))
    spec = f"http?url=http://127.0.0.1:9&tools={file}"

    def declared(toolset):
        return [tool.concurrent for tool in toolset.tools()]

    assert declared(make_toolset(spec)) == [False]
    assert declared(make_toolset(f"{spec}&concurrent=true")) == [True]
    assert declared(make_toolset("shell")) == [False, False]

    def look(key: str) -> str:
        return key

    assert declared(Functions(look)) == [False]
    assert declared(Functions(look, concurrent=True)) == [True]
    assert declared(Search("passages.jsonl")) == [True]
    with pytest.raises(ValueError, match="concurrent must be true or false, got 4"):
        Endpoint("http://127.0.0.1:9", (), concurrent=4)


def test_time_in_which_several_calls_lost_a_server_counts_once():
    retries = Retries(LONGEST)
    away = threading.Barrier(4)

    def request(number):
        tries = iter([True, False])

        def attempt(until):
            if next(tries):
                away.wait(LONGEST)
                raise UnreachableError("nobody listens")
            return number

        return retries(attempt)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(request, range(4))) == [0, 1, 2, 3]
    begins, ends = zip(*retries._failed, strict=True)
    assert len(begins) == 4
    # All overlap, as each waited until the last one had begun.
    assert retries.lost == pytest.approx(max(ends) - min(begins), abs=1e-9)
    assert retries.lost < sum(ends) - sum(begins)
