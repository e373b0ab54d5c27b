"""Episodes of OpenEnv against a server that keeps numbers, and fails as told."""

import pickle
import sys
import threading
import time

import pytest

pytest.importorskip("websockets", reason="needs the extra openenv")

from jaxrl_post.envs import Answer, Message, WorkerPool, make
from jaxrl_post.envs.servers import ServerError
from tests.envs.protocols.openenv_server import (
    Guess,
    error,
    observation,
    running,
    running_later,
)


def environment(url, options="seconds=15"):
    return make(f"openenv?url={url}&tasks=3&eval_tasks=2&{options}")


def said(text) -> Answer:
    return Answer("assistant", text, "stop", 3)


def guess(number) -> Answer:
    return said(f'{{"guess": {number}}}')


def test_a_task_is_a_seed_and_shows_schema_and_first_observation():
    game = Guess()
    with running(game) as url:
        found = environment(url)
        train, held_out = found.tasks("train"), found.tasks("eval")
        assert found.tasks("train") is train
    assert [task.data["seed"] for task in (*train, *held_out)] == [0, 2, 4, 1, 3]
    assert [task.id for task in train] == [0, 1, 2]
    system, prompt = train[1].messages
    assert prompt == Message("user", "Episode 2.\n\n1 to 9")
    assert system.role == "system"
    assert system.content.startswith("Answer with an action, a JSON object of this")
    assert '"guess": {"type": "integer"}' in system.content
    assert "metadata" not in system.content
    assert found.demonstration(train[0]) is None
    kinds = [message["type"] for message in game.seen]
    assert kinds == ["reset"] * 3 + ["close"] + ["reset"] * 2 + ["close"]


def test_an_episode_is_stepped_rewarded_and_closed():
    game = Guess()
    with running(game) as url:
        found = pickle.loads(pickle.dumps(environment(url)))
        found.prepare()
        task = found.tasks("train")[0]
        number = game.number(0)
        session, other = found.open(task), found.open(task)
        step = session.step(guess(number - 1 or 9))
        hint = "higher" if number > 1 else "lower"
        assert (step.reward, step.done) == (0.0, False)
        assert step.messages == (Message("user", hint),)
        assert other.step(guess(number)).done
        step = session.step(guess(number))
        assert (step.reward, step.done, step.messages) == (1.0, True, ())
        assert step.metrics == {"openenv/refused": 0.0}
        session.close()
        other.close()
        deadline = time.monotonic() + 10
        while game.open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert game.open == 0


def test_what_is_no_action_is_told_and_earns_nothing():
    with running(Guess()) as url:
        found = environment(url)
        session = found.open(found.tasks("train")[0])
        for text, told in (
            ("five", "error: an answer must hold an action, a JSON object, got 'five'"),
            ('{"guess": "x"}', "error: Invalid message: guess: must be an integer"),
            ('{"guess": 99}', "error: 99 is out of range"),
        ):
            step = session.step(said(text))
            assert (step.reward, step.done) == (0.0, False)
            assert step.messages == (Message("user", told),)
        assert step.metrics == {"openenv/refused": 3.0}
        session.close()


def test_a_field_may_be_the_answer():
    with running(Guess()) as url:
        found = environment(url, "action=guess&observation=hint&seconds=15")
        task = found.tasks("train")[0]
        assert "nothing but an action, the guess" in task.messages[0].content
        session = found.open(task)
        assert session.step(said(" 5 ")).messages[0].content in ("higher", "lower", "")
        assert "of type integer" in session.step(said("five")).messages[0].content
        session.close()
        plain = environment(url, "system=&seconds=15").tasks("train")[0]
        assert [message.role for message in plain.messages] == ["user"]
        with pytest.raises(ValueError, match="no field 'move'; they have guess"):
            environment(url, "action=move")
        shown = environment(url, "observation=board&seconds=15")
        with pytest.raises(ServerError, match="no field 'board'; it has hint"):
            shown.tasks("train")


def test_a_server_that_is_started_again_costs_an_episode_nothing_but_time():
    game = Guess()
    with running(game) as url:
        found = environment(url)
        task = found.tasks("train")[0]
        session = found.open(task)
        others = [n for n in range(1, 10) if n != game.number(0)]
        session.step(guess(others[0]))
        session.step(guess(99))
    again = Guess()
    with running_later(0.4, again, url):
        assert session.step(guess(game.number(0))).reward == 1.0
        session.close()
    assert [message["type"] for message in again.seen[:4]] == ["reset"] + ["step"] * 3
    assert again.seen[0]["data"] == {"seed": 0}
    assert again.seen[1]["data"] == {"guess": others[0]}


def test_a_server_that_does_not_come_back_fails_the_episode():
    with running(Guess()) as url:
        found = environment(url, "seconds=0.8")
        task = found.tasks("train")[0]
        session = found.open(task)
    with pytest.raises(ServerError, match=f"{url}: .*; tried .* within 0.8 s"):
        session.step(guess(5))
    session.close()
    with pytest.raises(ServerError, match="refused"):
        found.open(task)
    with pytest.raises(ValueError, match=r"/schema: .*refused; tried"):
        environment(url, "seconds=0.1")


def test_a_server_that_knows_another_world_fails_the_episode():
    with running(Guess()) as url:
        found = environment(url)
        task = found.tasks("train")[0]
        session = found.open(task)
        session.step(guess(Guess().number(0) % 9 + 1))

    class Other(Guess):
        def answer(self, connection, guess, seed):
            return {"hint": "warm"}, 0.0, False

    told = "answered call 1 of the episode, step, otherwise than before"
    with running(Other(), int(url[15:-3])):
        with pytest.raises(ServerError, match=told):
            session.step(guess(5))
        session.close()
    with running(Guess("no "), int(url[15:-3])):
        told = "a reset with seed 0 gave 'no 1 to 9' after '1 to 9'"
        with pytest.raises(ServerError, match=told):
            found.open(task)


def test_a_full_server_is_waited_for():
    game = Guess()
    with running(game) as url:
        found = environment(url, "seconds=10")
        task = found.tasks("train")[0]
        game.most = 1
        first = found.open(task)
        threading.Timer(0.4, first.close).start()
        second = found.open(task)
        second.close()
        game.most = 0
        hurried = environment(url, "seconds=0.8")
        with pytest.raises(ServerError, match=r"sessions are open; .*as many sessions"):
            hurried.tasks("train")


LARGE = observation({"hint": "x" * 5000})


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (({}, float("nan"), False), "the reward must be a finite number, got nan"),
        (({}, float("inf"), False), "the reward must be a finite number, got inf"),
        (({}, "1", False), "the reward must be a finite number, got '1'"),
        (({}, 0.0, None), "observation and done, got type 'observation' and done None"),
        (([], 0.0, False), r"an observation must be an object, got \[\]"),
        ("nonsense", "no answer of OpenEnv to 'step': 'nonsense'"),
        (b"\xff", "no answer of OpenEnv to 'step'"),
        ('{"type": "observation", "data": {}}', "no answer of OpenEnv to 'step'"),
        ('{"type": "error", "data": null}', "no answer of OpenEnv to 'step'"),
        (observation({}).replace("observation", "state", 1), "got type 'state'"),
        (error("SESSION_ERROR", "out of luck"), "error SESSION_ERROR: out of luck"),
        (LARGE, "an answer to 'step' of more than 4000 bytes"),
        ("slow", "no answer to 'step' in time"),
    ],
)
def test_an_answer_that_is_none_fails_the_episode(answer, told):
    class Bad(Guess):
        def answer(self, connection, guess, seed):
            if answer == "slow":
                time.sleep(4.0)
            return answer

    with running(Bad()) as url:
        found = environment(url, "seconds=2&most_bytes=4000")
        session = found.open(found.tasks("train")[0])
        with pytest.raises(ServerError, match=f"{url}: .*{told}"):
            session.step(guess(5))
        session.close()


def test_a_reward_that_is_null_is_zero():
    class Silent(Guess):
        def answer(self, connection, guess, seed):
            return {"hint": "?"}, None, False

    with running(Silent()) as url:
        found = environment(url)
        session = found.open(found.tasks("train")[0])
        assert session.step(guess(5)).reward == 0.0
        session.close()


def test_a_server_that_ends_at_its_reset_or_refuses_it_is_named():
    class Over(Guess):
        def converse(self, connection):
            connection.recv(timeout=10)
            connection.send(observation({"hint": "?"}, done=True))
            connection.recv(timeout=10)
            connection.send(error("EXECUTION_ERROR", "no such seed"))

    told = "seed 0 ends at its reset"
    with running(Over()) as url, pytest.raises(ServerError, match=told):
        environment(url).tasks("train")

    class Refusing(Guess):
        def converse(self, connection):
            connection.recv(timeout=10)
            connection.send(error("EXECUTION_ERROR", "no such seed"))

    told = "reset failed: no such seed"
    with running(Refusing()) as url, pytest.raises(ServerError, match=told):
        environment(url).tasks("train")


@pytest.mark.processes
def test_a_pool_takes_lost_sessions_again_and_names_the_server():
    game = Guess()
    with running(game) as url:
        found = environment(url, "seconds=3")
        task = found.tasks("train")[0]
        wrong = game.number(0) % 9 + 1
        with WorkerPool(found, 1, deadline_s=30.0) as pool:
            turns = (*task.messages, guess(wrong))
            first = pool.submit(task, turns, session="a").result(60)
            assert first.step is not None, first.error
            turns = (*turns, *first.step.messages, guess(game.number(0)))
            # Another process, or a resumed run.
            second = pool.submit(task, turns, session="b").result(60)
            assert second.step is not None, second.error
            assert second.step.reward == 1.0
            bad = task.__class__(0, task.messages, "", {**task.data, "first": "?"})
            third = pool.submit(bad, (*task.messages, guess(1)), session="c").result(60)
            assert third.step is None
            assert f"ServerError: {url}: a reset with seed 0" in str(third.error)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("seconds=0", "seconds must be positive, got 0"),
        ("seconds=soon", "seconds must be a number, got 'soon'"),
        ("most_bytes=0", "most_bytes must be"),
    ],
)
def test_options_outside_their_range_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        environment("ws://127.0.0.1:9/ws", options)


def test_a_server_of_something_else_is_named():
    plain = Guess()
    plain.schema = {"observation": {}}
    with running(plain) as url:
        with pytest.raises(ValueError, match="/schema: status 200 and no schema of an"):
            environment(url)
        other = Guess()
    with running(other) as url:
        found = environment(url)
        found.url = url.replace("/ws", "/other")
        with pytest.raises(ServerError, match="status 404 instead of a WebSocket"):
            found.tasks("train")


def test_a_missing_library_is_named(monkeypatch):
    with running(Guess()) as url:
        monkeypatch.setitem(sys.modules, "websockets", None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install -e .*\[openenv\]"):
            environment(url)
