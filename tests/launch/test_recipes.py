"""The recipes: options that fit each other, and what the warm start leaves to learn."""

import pytest

from jaxrl_post.config.checks import check_options
from jaxrl_post.data import chat
from jaxrl_post.envs import Message, StatelessEnvironment, Task
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.tasks import TaskSets
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.programs.agents import check_agents
from launch.grpo import PROGRAM

# Recipe: the share of demonstrations that may be longer than an answer.
CUT = {
    "demo": 0.0,
    "guess": 0.0,
    "world": 0.0,
    "nim": 0.0,
    "lookup": 0.0,
    "search": 0.0,
    "instructions": 0.05,
    "text2sql": 0.0,
    "code": 0.0,
    "python": 0.0,
}
TASKS = 200


def opened(name):
    """A recipe's configuration, its environment and its first training tasks."""
    config = PROGRAM.recipes[name]()
    environment = make_environment(config.env, config.data, config.tools)
    tasks = environment.tasks("train")
    shown = tuple(tasks[index] for index in range(TASKS))
    return config, environment, TaskSets(environment, shown, environment.tasks("eval"))


def test_every_recipe_has_a_case_but_that_of_an_extra():
    assert {*CUT, "chain_sum"} == set(PROGRAM.recipes)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.processes
def test_prompts_and_demonstrations_fit_the_options(name):
    config, environment, tasks = opened(name)
    check_options(config)
    check_agents(environment, config)
    assert config.run_dir == f"runs/{name}"
    tokenizer = environment_tokenizer(tasks, 512)
    rollout, cut = config.rollout, 0
    for task in tasks.train:
        shown = environment.demonstration(task)
        assert shown is not None
        prompt, answer = chat.answered(
            tokenizer, task.messages, shown, chat.with_tools(task.tools)
        )
        assert not rollout.max_prompt_tokens or len(prompt) <= rollout.max_prompt_tokens
        cut += len(answer) > rollout.max_tokens
    assert cut <= CUT[name] * TASKS


def rewarded(environment: StatelessEnvironment, task: Task) -> bool:
    answer = environment.demonstration(task)
    assert isinstance(answer, str)
    said = (*task.messages, Message("assistant", answer))
    return environment.step(task, said).reward == 1.0


@pytest.mark.parametrize("name", ["demo", "instructions"])
@pytest.mark.processes
def test_an_imitator_is_right_sometimes_and_wrong_sometimes(name):
    _, environment, tasks = opened(name)
    share = sum(rewarded(environment, task) for task in tasks.train) / TASKS
    assert 0.2 < share < 0.6
