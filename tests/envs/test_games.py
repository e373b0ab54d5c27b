"""The games: their rules, their tasks, and that a session is a game."""

import collections
import itertools

import pytest

from jaxrl_post.envs import Answer, StatefulEnvironment, make
from jaxrl_post.envs.tasks.guess import Guess
from jaxrl_post.envs.tasks.world import World
from jaxrl_post.envs.workers.sessions import Sessions

ENVIRONMENTS = [Guess(), Guess(size=15, guesses=4), World(), World(turns=6, begun=5)]
each_game = pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.name)


def play(environment, task, player) -> list:
    """The steps of a game, to its end."""
    session = environment.open(task)
    heard, steps = task.messages[-1].content, []
    for _ in range(100):
        step = session.step(Answer("assistant", player(heard)))
        steps.append(step)
        if step.done:
            return steps
        [message] = step.messages
        assert message.role == "user"
        heard = message.content
    raise AssertionError("the game has no end")


@pytest.mark.parametrize("name", ["guess", "world"])
def test_each_has_a_name(name):
    environment = make(name, options={"seed": 3})
    assert isinstance(environment, StatefulEnvironment)
    assert environment.tasks("eval")[0] == make(f"{name}?seed=3").tasks("eval")[0]


@pytest.mark.parametrize("said", ["9" * 5000, "0" * 5000, "7" * 4, "\u0663", "-1", ""])
def test_what_is_no_guess_is_told_so(said):
    environment = Guess(size=7)
    session = environment.open(environment.tasks("eval")[0])
    step = session.step(Answer("assistant", said))
    assert (step.reward, [each.content for each in step.messages]) == (0.0, ["?"])


def halving(size: int):
    """The player of the best strategy, from the hints alone."""
    low, high, last = 1, size, 0

    def player(heard: str) -> str:
        nonlocal low, high, last
        if heard == ">":
            low = last + 1
        if heard == "<":
            high = last - 1
        last = (low + high) // 2
        return str(last)

    return player


@pytest.mark.parametrize(("size", "guesses"), [(7, 3), (15, 4), (1, 1)])
def test_who_halves_what_is_left_always_finds_the_number(size, guesses):
    environment = Guess(size, guesses, begun=0)
    numbers = set()
    for task in environment.tasks("eval")[:100]:
        steps = play(environment, task, halving(size))
        assert [step.reward for step in steps][-1] == 1.0
        assert len(steps) <= guesses
        numbers.add(task.reference)
    assert numbers == {str(number) for number in range(1, size + 1)}


@pytest.mark.parametrize(
    "said", ["", "x", "0", "8", "-1", "4.0", " 4", "\u0664", "99999999999999999999"]
)
def test_what_is_no_number_of_the_range_costs_a_guess(said):
    environment = Guess()
    task = environment.tasks("eval")[0]
    steps = play(environment, task, lambda heard: said)
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0]
    assert [step.messages[0].content for step in steps[:-1]] == ["?", "?"]


def test_every_world_can_be_won_in_six_turns():
    """Every start, key and chest, by the shortest way."""
    environment = World(turns=6, begun=0, train_size=2000)
    lengths = collections.Counter()
    for task in environment.tasks("train"):
        game = environment.game(task)
        steps = []
        while not steps or not steps[-1].done:
            steps.append(game.play(game.advice()))
        assert [s.reward for s in steps if s.reward] == [0.25, 0.75]
        assert sum(s.reward for s in steps) == 1.0
        lengths[len(steps)] += 1
    # Take and open, and between them at most two rooms to the key, at least one and at
    # most two to the chest.
    assert set(lengths) == {3, 4, 5, 6}


def test_the_world_says_what_is_there():
    environment = World()
    task = next(
        task
        for task in environment.tasks("eval")
        if task.messages[0].content.endswith("hall: key; s w")
    )
    session = environment.open(task)

    def say(content: str) -> tuple[str, float]:
        step = session.step(Answer("assistant", content))
        return step.messages[0].content, step.reward

    assert say("open") == ("no; hall: key; s w", 0.0)
    assert say("n") == ("no; hall: key; s w", 0.0)
    assert say("take") == ("hall: -; s w +key", 0.25)
    assert say("take") == ("no; hall: -; s w +key", 0.0)
    assert say("w")[0] in ("attic: -; s e +key", "attic: chest; s e +key")


@each_game
def test_tasks_are_the_same_each_time_and_held_out(environment):
    train, evaluated = environment.tasks("train"), environment.tasks("eval")
    assert [*train[:20]] == [*environment.tasks("train")[:20]]
    prompts = {task.messages for task in train[:500]}
    assert len(prompts) == 500
    assert not prompts & {task.messages for task in evaluated}
    assert all(len(task.messages) == 1 for task in evaluated), "from the beginning"


@each_game
def test_training_games_begin_anywhere_and_can_go_on(environment):
    begun = collections.Counter()
    for task in environment.tasks("train")[:300]:
        begun[sum(message.role == "assistant" for message in task.messages)] += 1
        assert task.messages[-1].role == "user"
        steps = play(environment, task, lambda heard: "none")
        assert steps[-1].done
        assert environment.demonstration(task)
    assert set(begun) == set(range(environment.begun + 1))


@each_game
def test_a_session_that_is_taken_again_is_where_the_first_was(environment):
    task = environment.tasks("train")[7]
    first, said = Sessions(environment), ["none", "e", "4"]
    conversation = task.messages
    for turn in said:
        conversation = (*conversation, Answer("assistant", turn))
        step = first.step("a", task, conversation)
        again = Sessions(environment).step("a", task, conversation)
        assert again == step
        if step.done:
            break
        conversation = (*conversation, *step.messages)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Guess(size=0), r"size must be an integer in \[1, 99\], got 0"),
        (lambda: Guess(guesses=2, begun=2), r"begun must be an integer in \[0, 1\]"),
        (lambda: Guess(slips=1.5), r"slips must be a share in \[0, 1\], got 1.5"),
        (lambda: World(turns=0), r"turns must be an integer in \[1, 99\], got 0"),
        (lambda: World(train_size=1.5), "train_size must be an integer"),
        (lambda: World(slips=-0.1), r"slips must be a share in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range_are_refused(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()


def test_imitation_of_slips_is_no_better_than_chance():
    """The share of right demonstrations is what `slips` says, and the rest legal."""
    for slips, expected in ((0.0, 1.0), (1.0, 1 / 7), (0.8, 0.2 + 0.8 / 7)):
        environment = Guess(slips=slips)
        tasks = environment.tasks("train")[:1000]
        said = [environment.demonstration(task) for task in tasks]
        assert set(said) == {str(number) for number in range(1, 8)}
        right = sum(a == t.reference for a, t in zip(said, tasks, strict=True))
        # Three standard deviations of a share of 1000.
        assert right / 1000 == pytest.approx(expected, abs=0.05)
    world = World(slips=0.0)
    tasks = itertools.islice(world.tasks("train"), 50)
    assert all(world.demonstration(task) == task.reference for task in tasks)
