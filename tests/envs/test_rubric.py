import pytest

from jaxrl_post.envs import Message, NeedsPreparation, Step, WorkerPool
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.guess import Guess
from jaxrl_post.envs.tasks.nim import Nim


def length(task, conversation) -> float:
    return float(len(conversation[-1].content))


def politeness(task, conversation) -> float:
    return 1.0 if "please" in conversation[-1].content else 0.0


def test_reward_is_the_weighted_sum_and_every_term_is_reported():
    criteria = {
        "length": Criterion(length, weight=-0.125),
        "politeness": Criterion(politeness, weight=2.0),
    }
    environment = Rubric(Arithmetic.at_level(1), criteria, own_weight=4.0)
    task = environment.tasks("train")[0]
    right = environment.step(task, (Message("assistant", task.reference + "  "),))
    # 4 * 1 - 0.125 * 4 + 2 * 0, and then 4 * 0 - 0.125 * 6 + 2 * 1.
    assert right == Step(
        reward=3.5,
        done=True,
        metrics={"correct": 1.0, "well_formed": 1.0},
        rewards={"own": 1.0, "length": 4.0, "politeness": 0.0},
    )
    assert environment.step(task, (Message("assistant", "please"),)).reward == 1.25
    assert environment.name == "arithmetic(+,2x1)+length+politeness"
    assert environment.demonstration(task) == task.reference
    assert list(environment.tasks("eval")) == list(Arithmetic.at_level(1).tasks("eval"))


def test_criteria_wait_for_the_end_of_the_episode(scripted):
    environment = Rubric(
        scripted.Scripted(), {"length": Criterion(length)}, own_weight=2.0
    )
    task = environment.tasks("train")[0]
    step = environment.step(task, (Message("assistant", "say hello"),))
    assert (step.reward, step.done) == (-1.0, False)
    assert step.metrics == {"turns": 3.0}
    assert step.rewards == {"own": -0.5}
    assert step.messages == (Message("user", "hello"),)


@pytest.mark.processes
def test_it_runs_in_a_worker_and_prepares_what_it_holds(scripted):
    criteria = {"brevity": Criterion(scripted.brevity)}
    with WorkerPool(Rubric(Arithmetic.at_level(1), criteria)) as pool:
        task = Arithmetic.at_level(1).tasks("train")[0]
        turn = (*task.messages, Message("assistant", "99"))
        step = pool.submit(task, turn).result(timeout=30).step
        assert step is not None
        assert step.reward == 0.5
    unprepared = Rubric(scripted.Unprepared(), criteria)
    assert isinstance(unprepared, NeedsPreparation)
    with pytest.raises(ModuleNotFoundError, match="pip install grader"):
        unprepared.prepare()
    Rubric(Arithmetic(), criteria).prepare()


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"agents, got nim.*: .* have its `run` add"):
        Rubric(Nim(), {"length": Criterion(length)})
    with pytest.raises(ValueError, match=r"`step`.* got Guess: have its sessions add"):
        Rubric(Guess(), {"length": Criterion(length)})
    with pytest.raises(ValueError, match="criteria must hold at least one"):
        Rubric(Arithmetic(), {})
    with pytest.raises(ValueError, match="must not be named 'own'"):
        Rubric(Arithmetic(), {"own": Criterion(length)})
    with pytest.raises(ValueError, match="own_weight must be finite, got nan"):
        Rubric(Arithmetic(), {"length": Criterion(length)}, own_weight=float("nan"))
    with pytest.raises(ValueError, match="weight must be finite, got inf"):
        Criterion(length, weight=float("inf"))


def test_a_criterion_may_have_the_name_of_a_metric():
    environment = Rubric(Arithmetic(), {"correct": Criterion(length)})
    task = environment.tasks("train")[0]
    step = environment.step(task, (Message("assistant", "1"),))
    assert step.rewards["correct"] == 1.0
    assert step.metrics["correct"] in (0.0, 1.0)
