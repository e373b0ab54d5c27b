"""The game of two players, against answers of a script over HTTP."""

import contextlib
import http.server
import json
import re
import threading

import pytest

from jaxrl_post.envs import AgentEnvironment, Message, Step, Task, make, player_url
from jaxrl_post.envs.servers import ServerError
from jaxrl_post.envs.tasks.nim import Nim
from jaxrl_post.envs.workers.sessions import Sessions
from jaxrl_post.envs.workers.wire import decode_step, encode_step

PLAIN = Nim(instruction="")


@contextlib.contextmanager
def answering(answer):
    """The base URL of an episode, and its calls: path and messages."""
    calls = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            messages = json.loads(self.rfile.read(size))["messages"]
            calls.append((self.path, [message["content"] for message in messages]))
            said = answer(len(calls) - 1, messages)
            message = {"role": "assistant", "content": said}
            body = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(400 if said == "refuse" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/episodes/0-0/v1", calls
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def task(stones: int, split: str = "train", prefix: str = "") -> Task:
    data = {"stones": stones, "game": "one", "split": split, "prefix": prefix}
    return Task(0, (Message("user", f"{stones}="),), "", data)


def played(stones, *said, prefix=""):
    with answering(lambda number, _: said[number]) as (url, calls):
        return PLAIN.run(task(stones, prefix=prefix), url), calls


def test_the_players_take_turns_and_hear_what_is_left():
    step, calls = played(7, "3", "1", "I take 2", "1")
    first, second = (
        f"/episodes/0-0/players/{name}/v1/chat/completions"
        for name in ("first", "second")
    )
    assert calls == [
        (first, ["7="]),
        (second, ["4="]),
        (first, ["7=", "3", "3="]),
        (second, ["4=", "1", "1="]),
    ]
    assert (step.reward, step.players) == (0.0, {"first": -1.0, "second": 1.0})
    assert step.metrics == {"illegal": 0.0, "moves": 4.0}


@pytest.mark.parametrize("said", ["0", "4", "none", "", "1" * 5000])
def test_an_illegal_move_loses_at_once(said):
    step, _ = played(7, "3", said)
    assert step.players == {"first": 1.0, "second": -1.0}
    assert step.metrics == {"illegal": 1.0, "moves": 2.0}
    # More than is left; and a player that did not move has no reward.
    step, _ = played(4, "1", "2", "2")
    assert step.players == {"first": -1.0, "second": 1.0}
    step, _ = played(7, said)
    assert step.players == {"first": -1.0}


def test_the_instruction_is_given_once():
    _, calls = played(5, "3", "1", "1", prefix="Play. 14 ")
    assert calls[1][1] == ["Play. 14 2="]
    assert calls[2][1] == ["Play. 14 5=", "3", "1="]


def test_the_opponent_that_is_perfect_wins_unless_it_cannot():
    perfect = Nim(skill=1.0, instruction="")
    with answering(lambda *_: "1") as (url, _):
        step = perfect.run(task(8, "eval"), url)
    assert (step.reward, step.players, step.metrics["illegal"]) == (0.0, {}, 0.0)

    def best(_, messages):
        return str(int(messages[-1]["content"].rstrip("=").split()[-1]) % 4)

    for number in range(0, 20, 2):
        with answering(best) as (url, calls):
            held_out = perfect.tasks("eval")[number]
            step = perfect.run(held_out, url)
        assert {path for path, _ in calls} == {"/episodes/0-0/v1/chat/completions"}
        assert step.reward == float(held_out.data["stones"] % 4 > 0)


def test_the_opponent_is_the_same_in_every_run():
    def heard(game):
        with answering(lambda *_: "1") as (url, calls):
            game.run(task(21, "eval"), url)
        return [messages[-1] for _, messages in calls]

    assert heard(PLAIN) == heard(PLAIN)
    assert heard(PLAIN) != heard(Nim(skill=1.0, instruction=""))


def test_tasks_and_demonstrations():
    game = make("nim?least=4&most=6&instruction=")
    assert isinstance(game, AgentEnvironment)
    assert game == Nim(least=4, most=6, instruction="")
    for split, fewest in (("train", 4), ("eval", 1)):
        tasks = game.tasks(split)[:100]
        stones = {each.data["stones"] for each in tasks}
        assert (min(stones), max(stones)) == (fewest, 6)
        for each in tasks:
            number = 2 * each.id + (split == "eval")
            assert each.messages[0].content == f"{number} {each.data['stones']}="
            taken = game.move(game.demonstration(each), each.data["stones"])
            assert taken is not None


def test_a_game_that_has_begun_goes_on():
    game = Nim(least=1, most=9, begun=0.5, instruction="Play. ")
    tasks = game.tasks("train")[:200]
    begun = [each for each in tasks if len(each.messages) == 3]
    assert 50 < len(begun) < 100
    assert all(len(each.messages) == 1 for each in game.tasks("eval"))
    for each in begun[:2]:
        opening, said, heard = (message.content for message in each.messages)
        left = each.data["stones"]
        before = int(opening.removesuffix("=").split()[-1])
        assert heard == f"{left}="
        assert 1 <= before - int(said) - left <= 3
        # A player that takes one stone at a time ends every game.
        with answering(lambda *_: "1") as (url, calls):
            step = game.run(each, url)
        assert calls[0][1] == [opening, said, heard]
        assert step.metrics == {"illegal": 0.0, "moves": float(left)}
        if left > 1:
            number = each.messages[0].content.split()[1]
            assert calls[1][1] == [f"Play. {number} {left - 1}="]


def test_a_demonstration_is_the_best_move_or_takes_as_many_as_may_be():
    def shown(slips):
        game = Nim(least=1, most=9, slips=slips, instruction="")
        tasks = game.tasks("train")[:300]
        return [(each.data["stones"], game.demonstration(each)) for each in tasks]

    most = {(stones, str(min(stones, 3))) for stones in range(1, 10)}
    best = {(stones, str(stones % 4)) for stones in range(1, 10) if stones % 4}
    assert set(shown(1)) == most
    # Where no move is good it is the same as of the careless.
    assert set(shown(0)) == best | {(4, "3"), (8, "3")}
    mixed = shown(0.7)
    careless = [each in most for each in mixed if each[0] in (5, 6, 9)]
    assert set(mixed) == most | best
    assert 0.6 < sum(careless) / len(careless) < 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least": 0}, r"least must be an integer in \[1, 21\], got 0"),
        ({"most": 100}, r"most must be an integer in \[4, 99\], got 100"),
        ({"skill": 1.5}, r"skill must be a share in \[0, 1\]"),
        ({"begun": 2}, r"begun must be a share in \[0, 1\]"),
        ({"slips": -1}, r"slips must be a share in \[0, 1\]"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Nim(**options)


def test_a_call_that_is_refused_fails_the_game():
    with pytest.raises(ServerError, match="chat/completions: status 400"):
        played(7, "refuse")


@pytest.mark.parametrize("name", ["", "a/b", "é", "a b", "x" * 65])
def test_names_that_no_path_has_are_refused(name):
    with pytest.raises(ValueError, match="must be 1 to 64 letters, digits, dashes"):
        player_url("http://127.0.0.1:1/episodes/0-0/v1", name)


@pytest.mark.parametrize("url", ["http://a/episodes/0", "http://a/players/b/v1", ""])
def test_a_url_of_no_episode_is_refused(url):
    with pytest.raises(ValueError, match="base_url must be"):
        player_url(url, "first")


def test_rewards_of_players_reach_the_trainer():
    step = Step(0.0, done=True, players={"first": 1, "second": -1.0})
    fields = json.loads(json.dumps(encode_step(step)))
    assert decode_step(fields) == step
    assert "players" not in encode_step(Step(0.0, done=True))
    for bad in (float("nan"), "1", 10**400):
        with pytest.raises(ValueError, match="reward of player 'a' must be a finite"):
            encode_step(Step(0.0, done=True, players={"a": bad}))  # type: ignore[dict-item]


def test_players_of_an_environment_without_agents_are_refused(scripted):
    class Rewards(scripted.Scripted):
        def step(self, task, conversation):
            return Step(0.0, done=True, players={"a": 1.0})

    with pytest.raises(ValueError, match=re.escape("only episodes of agents have")):
        Sessions(Rewards()).step("one", task(4), ())
