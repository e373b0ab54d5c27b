"""Episodes of NeMo Gym against a resource server that counts, and fails as told."""

import itertools
import json
import pickle
import re
import threading
import time

import pytest
from openai.types.responses import Response

from jaxrl_post.envs import Answer, Message, ToolCall, WorkerPool, make
from jaxrl_post.envs.protocols.responses import messages_of, response_of, tools_of
from jaxrl_post.envs.servers import ServerError
from jaxrl_post.jsonl import BadRowError
from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures.contents import data_url
from tests.envs.tools.http_servers import serving, serving_later
from tests.seeing import RED

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds to a sum.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}


def row(number: int) -> dict:
    return {
        "responses_create_params": {
            "input": [
                {"role": "developer", "content": "Add up."},
                {"role": "user", "content": f"{number}+4="},
            ],
            "tools": [ADD],
        },
        "expected": number + 4,
        "agent_ref": {"name": "simple"},
    }


class Sums:
    """The server: a sum for each session, which starts with nothing."""

    def __init__(self, start=0, **changed):
        self.start = start
        self.sums = {}
        self.seen = []
        self.changed = changed
        self.numbers = itertools.count()

    def cookies(self, handler):
        if handler.path == "/seed_session":
            return [f"session={max(self.sums)}; Path=/; HttpOnly; SameSite=lax"]
        return []

    def __call__(self, handler, name, said):
        self.seen.append((name, said))
        changed = self.changed.get(name)
        if changed is not None:
            return changed(handler) if callable(changed) else changed
        if name == "seed_session":
            self.sums[next(self.numbers)] = self.start
            return 200, "{}"
        cookie = handler.headers["Cookie"] or ""
        session = int(cookie.removeprefix("session=") or -1)
        if session not in self.sums:
            return 400, "no session"
        if name == "verify":
            answer = said["response"]["output"][-1]["content"][0]["text"]
            return 200, json.dumps(
                {**said, "reward": float(answer == str(said["expected"]))}
            )
        if not isinstance(said.get("a"), int):
            return 422, '{"detail": "a must be an integer"}'
        self.sums[session] += said["a"]
        return 200, str(self.sums[session])


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row(number)) + "\n" for number in range(40)))
    return file


def environment(url, path, seconds=15):
    return make(f"nemo-gym?url={url}&path={path}&seconds={seconds}")


def call(**arguments) -> Answer:
    made = ToolCall("add", json.dumps(arguments), "000000000")
    return Answer("assistant", "", "stop", 3, tool_calls=(made,))


def test_tasks_come_from_the_rows(path):
    found = environment("http://127.0.0.1:9", path)
    train, held_out = found.tasks("train"), found.tasks("eval")
    assert len(train) + len(held_out) == 40
    assert held_out
    assert train[1].id == 1
    assert train[0].messages == (
        Message("system", "Add up."),
        Message("user", f"{train[0].data['row']['expected'] - 4}+4="),
    )
    function = train[0].tools[0]["function"]
    assert function == {key: ADD[key] for key in ("name", "description", "parameters")}
    assert found.demonstration(train[0]) is None


def test_an_episode_seeds_calls_and_is_judged(path):
    sums = Sums()
    with serving(sums, sums.cookies) as server:
        found = pickle.loads(pickle.dumps(environment(server.url, path)))
        (task, *_) = found.tasks("train")
        number = task.data["row"]["expected"] - 4
        session, other = found.open(task), found.open(task)
        assert session.step(call(a=number)).messages[0].content == str(number)
        assert other.step(call(a=1)).messages[0].content == "1"
        told = session.step(call(a="x")).messages[0].content
        assert told == '{"detail": "a must be an integer"}'
        assert session.step(call(a=4)).messages[0].content == str(number + 4)
        last = session.step(Answer("assistant", str(number + 4)))
        assert (last.reward, last.done) == (1.0, True)
        assert last.metrics["tools/calls"] == 3
        assert other.step(Answer("assistant", "?", "length")).reward == 0.0
        session.close()
        other.close()
    names = [name for name, _ in sums.seen]
    assert names == [
        *("seed_session", "add", "seed_session", "add", "add", "add"),
        *("verify", "verify"),
    ]
    assert sums.seen[0][1] == row(number)
    said = sums.seen[6][1]
    response = said.pop("response")
    assert said == row(number)
    assert Response.model_validate(response).output_text == str(number + 4)
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["function_call", "function_call_output"] * 3 + ["message"]
    assert [item.get("call_id") for item in response["output"]] == [
        *("call_0", "call_0", "call_1", "call_1", "call_2", "call_2", None)
    ]
    assert response["output"][1]["output"] == str(number)
    assert sums.seen[7][1]["response"]["output"][-1]["status"] == "incomplete"


def test_a_server_that_is_started_again_costs_an_episode_nothing_but_time(path):
    first = Sums()
    with serving(first, first.cookies) as server:
        found = environment(server.url, path)
        (task, *_) = found.tasks("train")
        session = found.open(task)
        session.step(call(a=1))
        session.step(call(a=2))
        port = server.server_port
    again = Sums()
    with serving_later(0.5, again, again.cookies, port):
        assert session.step(call(a=3)).messages[0].content == "6"
        number = task.data["row"]["expected"]
        assert session.step(Answer("assistant", str(number))).reward == 1.0
    names = [name for name, _ in again.seen]
    assert names == ["seed_session", "add", "add", "add", "verify"]
    assert again.seen[1:4] == [("add", {"a": a}) for a in (1, 2, 3)]
    session.close()


def test_a_server_that_was_started_again_between_two_requests_is_noticed(path):
    first = Sums()
    with serving(first, first.cookies) as server:
        found = environment(server.url, path)
        session = found.open(found.tasks("train")[0])
        session.step(call(a=1))
        port = server.server_port
    again = Sums()
    with serving(again, again.cookies, port):
        assert session.step(call(a=2)).messages[0].content == "3"
    assert [name for name, _ in again.seen] == ["seed_session", "add", "add"]
    session.close()


def test_a_server_that_breaks_off_gets_the_call_once_a_session(path):
    broken = iter([True])
    sums = Sums()

    def answer(handler, name, said):
        found = sums(handler, name, said)
        # Carried out, but the answer is lost: in a new session it counts once.
        if name == "add" and next(broken, False):
            return handler.break_off()
        return found

    with serving(answer, sums.cookies) as server:
        found = environment(server.url, path)
        session = found.open(found.tasks("train")[0])
        assert session.step(call(a=3)).messages[0].content == "3"
        session.close()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ((200, '{"reward": NaN}'), "must be a finite number, got nan"),
        ((200, '{"reward": -Infinity}'), "must be a finite number, got -inf"),
        ((200, '{"reward": 1e999}'), "must be a finite number, got inf"),
        ((200, '{"reward": "1.0"}'), "must be a finite number, got '1.0'"),
        ((200, '{"reward": true}'), "must be a finite number, got True"),
        ((200, '{"reward": null}'), "must be a finite number, got None"),
        ((200, '{"reward": [1]}'), r"must be a finite number, got \[1\]"),
        ((200, f'{{"reward": {10**400}}}'), "must be a finite number, got 1000"),
        ((200, '{"rewards": 1}'), "no field 'reward' in '{\"rewards\": 1}'"),
        ((200, "[1]"), "no field 'reward'"),
        ((200, '{"reward": 1'), "no JSON"),
        ((500, "Internal Server Error"), "status 500, 'Internal Server Error'"),
        ((422, "no such row"), "status 422, 'no such row'"),
    ],
)
def test_a_judgement_that_is_none_fails_and_is_named(path, body, told):
    sums = Sums(verify=body)
    with serving(sums, sums.cookies) as server:
        found = environment(server.url, path)
        session = found.open(found.tasks("train")[0])
        with pytest.raises(ServerError, match=f"POST {server.url}/verify: .*{told}"):
            session.step(Answer("assistant", "4"))
        session.close()


def test_what_a_tool_says_is_told_and_what_the_machine_does_is_not(path):
    sums = Sums(add=(500, "Traceback"))
    with serving(sums, sums.cookies) as server:
        found = environment(server.url, path)
        (task, *_) = found.tasks("train")
        session = found.open(task)
        told = session.step(call(a=1)).messages[0].content
        assert told == "error: the server failed with status 500"
        session.close()
        sums.changed = {"add": lambda handler: time.sleep(4.0)}
        session = environment(server.url, path, seconds=2.0).open(task)
        told = session.step(call(a=1)).messages[0].content
        assert told == "error: no answer within 2 s"
        session.close()
        sums.changed = {"add": (503, "later")}
        session = environment(server.url, path, seconds=2.0).open(task)
        told = "/add: status 503.*; tried .* within 2 s"
        with pytest.raises(ServerError, match=told):
            session.step(call(a=1))
        session.close()
        for changed, told in (
            ((404, "Not Found"), "/seed_session: status 404, 'Not Found'"),
            (lambda handler: time.sleep(4.0), "/seed_session: no answer in time"),
        ):
            sums.changed = {"seed_session": changed}
            session = environment(server.url, path, seconds=2.0).open(task)
            with pytest.raises(ServerError, match=told):
                session.step(call(a=1))
            session.close()


def test_a_server_that_knows_other_numbers_fails_the_episode(path):
    sums = Sums()
    with serving(sums, sums.cookies) as server:
        found = environment(server.url, path)
        session = found.open(found.tasks("train")[0])
        session.step(call(a=1))
        port = server.server_port
    other = Sums(start=6)
    told = "answered call 1 of the episode, add, otherwise than before: '7' after '1'"
    with (
        serving(other, other.cookies, port),
        pytest.raises(ServerError, match=told),
    ):
        session.step(call(a=1))
    session.close()


def test_an_earlier_call_that_is_slow_when_it_is_made_again_is_not_told(path):
    first = Sums()
    with serving(first, first.cookies) as server:
        found = environment(server.url, path, seconds=2.0)
        session = found.open(found.tasks("train")[0])
        session.step(call(a=1))
        port = server.server_port
    slow = Sums(add=lambda handler: time.sleep(4.0))
    told = "/add: no answer in time; tried .* within 2 s"
    with serving(slow, slow.cookies, port), pytest.raises(ServerError, match=told):
        session.step(call(a=2))
    session.close()


@pytest.mark.parametrize("again", [False, True])
def test_a_call_that_was_told_as_slow_may_have_any_outcome_in_a_new_session(
    path, again
):
    ended = threading.Event()

    def slow(sums):
        def answer(handler, name, said):
            if name == "add" and said["a"] == 5:
                ended.wait(20)
                return 200, "too late"
            return sums(handler, name, said)

        return answer

    first, second = Sums(), Sums()
    with serving(slow(first), first.cookies) as server:
        session = environment(server.url, path, seconds=2.0).open(
            environment(server.url, path).tasks("train")[0]
        )
        assert session.step(call(a=1)).messages[0].content == "1"
        step = session.step(call(a=5))
        assert step.messages[0].content == "error: no answer within 2 s"
        assert step.metrics["tools/errors/slow"] == 1.0
        port = server.server_port
        server.end()
        with serving(slow(second) if again else second, second.cookies, port):
            # Not carried out if it is slow again, and carried out otherwise.
            found = session.step(call(a=2)).messages[0].content
            assert found == ("3" if again else "8")
        ended.set()
    session.close()


@pytest.mark.processes
def test_a_pool_names_the_server_and_takes_lost_sessions_again(path):
    sums = Sums()
    with serving(sums, sums.cookies) as server:
        found = environment(server.url, path, seconds=3)
        (task, *_) = found.tasks("train")
        with WorkerPool(found, 1, deadline_s=30.0) as pool:
            turn = call(a=5)
            first = pool.submit(task, (*task.messages, turn), session="a").result(60)
            assert first.step is not None, first.error
            conversation = (*task.messages, turn, *first.step.messages, call(a=6))
            second = pool.submit(task, conversation, session="b").result(60)
            assert second.step.messages[0].content == "11"
            assert len(sums.sums) == 2
            url = server.url
            server.end()
            answer = (*task.messages, Answer("assistant", "4"))
            third = pool.submit(task, answer, session="c").result(60)
            assert third.step is None
            told = f"{url}: .*refused"
            assert re.search(told, str(third.error))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({}, "rows.jsonl:1: no object 'responses_create_params'"),
        ({"input": 3}, "input must be a text or a list, got 3"),
        ({"input": []}, "the prompt is empty"),
        ({"input": [3]}, "input 0 must be an object"),
        ({"input": [{"role": "robot", "content": "a"}]}, "got type 'message' and role"),
        ({"input": [{"type": "computer_call"}]}, "got type 'computer_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input 0: content: part 1: has no picture; give a data: URL",
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tool 0 must be a func"),
        ({"input": "a", "tools": [ADD, ADD]}, "tool 1: there are two of the name"),
        ({"input": "a", "tools": [{**ADD, "name": "verify"}]}, "the name 'verify'"),
    ],
)
def test_rows_that_are_none_are_refused(tmp_path, bad, told):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"responses_create_params": bad} if bad else {"a": 1}))
    with pytest.raises(ValueError, match=told):
        environment("http://127.0.0.1:9", file).tasks("train")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("seconds=0", "seconds must be positive, got 0"),
        ("seconds=soon", "seconds must be a number, got 'soon'"),
        ("max_calls=0", "max_calls must be an integer"),
    ],
)
def test_options_outside_their_range_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        make(f"nemo-gym?url=http://127.0.0.1:9&path=rows.jsonl&{options}")


def test_a_request_may_hold_earlier_turns():
    messages = messages_of(
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "3+4="}]},
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": "I add."},
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "add",
                    "arguments": "{}",
                },
                {"type": "function_call_output", "call_id": "c", "output": "7"},
            ]
        }
    )
    assert messages == (
        Message("user", "3+4="),
        Message("assistant", "I add.", tool_calls=(ToolCall("add", "{}", "c"),)),
        Message("tool", "7", tool_call_id="c", name="add"),
    )
    assert tools_of({"tools": None}) == ()
    with pytest.raises(BadRowError, match="must end with a message to answer"):
        messages_of({"input": [{"role": "assistant", "content": "a"}]})


def test_calls_that_could_not_be_read_stand_in_the_response():
    said = [
        Message("assistant", "<tool_call>{"),
        Message("user", "1 of the calls could not be read"),
        Message("assistant", "7"),
    ]
    output = response_of({}, said, name="r")["output"]
    assert [item["role"] for item in output] == ["assistant", "user", "assistant"]


def test_pictures_of_a_request_survive_both_directions():
    parts = [
        {"type": "input_image", "image_url": data_url(RED)},
        {"type": "input_text", "text": "What?"},
    ]
    [message] = messages_of({"input": [{"role": "user", "content": parts}]})
    assert message == Message("user", f"{PICTURE}What?", pictures=(RED,))
    result = Message("tool", f"1{PICTURE}", tool_call_id="1", pictures=(RED,))
    output = response_of({}, [message, result], name="r")["output"]
    assert output[0]["content"] == parts
    assert output[1]["output"] == [
        {"type": "input_text", "text": "1"},
        {"type": "input_image", "image_url": data_url(RED)},
    ]


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"role": "user", "image_url": "http://a/b.png"}, "never fetched"),
        ({"role": "user", "image_url": "a.png"}, "a path needs a folder"),
        ({"role": "user", "image_url": data_url(RED[:-30])}, "truncated or damaged"),
        ({"role": "assistant", "image_url": data_url(RED)}, "must be text, got a pict"),
    ],
)
def test_bad_pictures_of_a_request_are_refused(item, told):
    part = {"type": "input_image", "image_url": item["image_url"]}
    with pytest.raises(BadRowError, match="input 0") as caught:
        messages_of({"input": [{"role": item["role"], "content": [part]}]})
    assert told in str(caught.value)
