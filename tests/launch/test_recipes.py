"""The recipes: options that fit each other, and what the warm start leaves to learn."""

import json
import re
from dataclasses import replace

import pytest

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.horizon import with_horizons
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.data import chat, learned
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Message, StatelessEnvironment, Task
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.tasks import TaskSets
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures import Eyes
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.pretrained.vision.picture_files import eyes_of
from jaxrl_post.programs.build.agents import check_agents
from launch import grpo, reward
from launch.cli import read_options
from launch.grpo import PROGRAM
from launch.recipes.demo import ppo_demo
from launch.recipes.questions import COLOURS, DAYS, FILES, NAMES, THINGS, files
from launch.recipes.sums import MODEL, QUESTIONS, questions

# Recipe: the share of demonstrations that may be longer than an answer.
CUT = {
    "demo": 0.0,
    "guess": 0.0,
    "world": 0.0,
    "nim": 0.0,
    "lookup": 0.0,
    "search": 0.0,
    "instructions": 0.05,
    "pictures": 0.0,
    "text2sql": 0.0,
    "code": 0.0,
    "python": 0.0,
    "jsonl": 0.0,
    "mixture": 0.05,
    "reward_model": 0.0,
    "process_reward": 0.0,
    "prime": 0.0,
}
TASKS = 200


def opened(name):
    """A recipe's configuration, its environment and its first training tasks."""
    config = PROGRAM.recipes[name]()
    environment = make_environment(config.env, config.data, config.tools)
    tasks = environment.tasks("train")
    shown = tuple(tasks[index] for index in range(TASKS))
    return config, environment, TaskSets(environment, shown, environment.tasks("eval"))


def test_every_recipe_has_a_case_but_that_of_an_extra_and_that_of_a_real_model():
    assert {*CUT, "chain_sum", "sums"} == set(PROGRAM.recipes)


# Optimizer steps of the warm-up at a recipe's own number of steps.
WARMUPS = dict.fromkeys(CUT, 10) | dict.fromkeys(
    ("demo", "guess", "world", "nim", "prime"), 5
)


@pytest.mark.parametrize("name", PROGRAM.recipes)
def test_a_recipe_warms_up_as_long_as_it_was_measured_and_fits_a_short_run(name):
    config = PROGRAM.recipes[name]()
    expected = {**WARMUPS, "chain_sum": 20, "sums": 0}[name]
    assert with_horizons(config, None).optimizer.warmup_steps == expected
    short = with_horizons(replace(config, steps=2), None)
    assert short.optimizer.warmup_steps <= 2


def test_reward_models_and_critics_warm_up_as_long_as_they_were_measured():
    for recipe in reward.PROGRAM.recipes.values():
        assert with_horizons(recipe(), None).optimizer.warmup_steps == 10
    critic = with_horizons(ppo_demo(), None).critic.optimizer
    prm = with_horizons(PROGRAM.recipes["prime"](), None).prm.optimizer
    assert critic.warmup_steps == prm.warmup_steps == 5


@pytest.mark.parametrize("name", CUT)
@pytest.mark.processes
def test_prompts_and_demonstrations_fit_the_options(name):
    config, environment, tasks = opened(name)
    check_options(config)
    check_agents(environment, config)
    assert config.run_dir == f"runs/{name}"
    tokenizer = environment_tokenizer(tasks, 512)
    if config.vision != "off":
        tokenizer = tokenizer.with_eyes(_eyes(config, tokenizer))
    rollout, cut = config.rollout, 0
    for task in tasks.train:
        shown = environment.demonstration(task)
        assert shown is not None
        prompt, answer = learned.answered(
            tokenizer, task.messages, shown, chat.with_tools(task.tools)
        )
        assert not rollout.max_prompt_tokens or len(prompt) <= rollout.max_prompt_tokens
        cut += len(answer) > rollout.max_tokens
    assert cut <= CUT[name] * TASKS


def _eyes(config: RLConfig, tokenizer: Tokenizer) -> Eyes:
    vision = PRESETS[config.model].vision
    assert vision is not None
    [token] = tokenizer.encode(PICTURE)
    return eyes_of(replace(vision, image_token=token), None)


def rewarded(environment: StatelessEnvironment, task: Task) -> bool:
    answer = environment.demonstration(task)
    assert isinstance(answer, str)
    said = (*task.messages, Message("assistant", answer))
    return environment.step(task, said).reward == 1.0


@pytest.mark.parametrize("name", ["demo", "instructions", "jsonl"])
@pytest.mark.processes
def test_an_imitator_is_right_sometimes_and_wrong_sometimes(name):
    _, environment, tasks = opened(name)
    share = sum(rewarded(environment, task) for task in tasks.train) / TASKS
    assert 0.2 < share < 0.6


def test_the_files_of_questions_are_those_that_are_generated():
    for name, text in files().items():
        assert (FILES / name).read_text(encoding="utf-8") == text


def test_every_row_of_the_files_asks_about_another_sentence():
    rows = [json.loads(line) for text in files().values() for line in text.splitlines()]
    asked = [row["prompt"].partition(". ")[0] for row in rows]
    assert len(set(asked)) == len(asked) == 6400


def test_a_step_is_labelled_right_where_it_answers_its_question():
    """Every step: in the order what, who, when, and of the words of the sentence."""
    of_kind = ((COLOURS, THINGS), (NAMES,), (DAYS,))
    labels = []
    for row in map(json.loads, files()["steps.jsonl"].splitlines()):
        sentence, _, _ = row["prompt"].partition(". ")
        assert len(row["completions"]) == len(row["labels"]) == len(of_kind)
        for step, label, kinds in zip(
            row["completions"], row["labels"], of_kind, strict=True
        ):
            assert step in sentence
            words = [word for word in step.split() if word != "a"]
            right = len(words) == len(kinds) and all(
                word in kind for word, kind in zip(words, kinds, strict=True)
            )
            assert label is right
            labels.append(label)
    assert 0.25 < labels.count(False) / len(labels) < 0.35


def test_the_reward_model_prefers_what_the_grader_prefers():
    """Every pair, as the environment of the recipe `reward_model` grades it."""
    grader = PROGRAM.recipes["reward_model"]().env
    assert grader.startswith("jsonl?grader=f1")
    environment = make_environment(
        "jsonl?grader=f1&answer=chosen", DataConfig(str(FILES / "pairs.jsonl")), ()
    )
    rows = map(json.loads, (FILES / "pairs.jsonl").read_text("utf-8").splitlines())
    rejected = {row["prompt"]: row["rejected"] for row in rows}
    for task in environment.tasks("eval"):
        [prompt] = task.messages
        graded = [
            environment.step(task, (prompt, Message("assistant", said))).reward
            for said in (task.reference, rejected[prompt.content])
        ]
        assert graded[0] == 1.0
        # At most the colour of a thing: one word of two, and no other.
        assert graded[1] <= 2 / 3


@pytest.mark.parametrize(
    ("judge", "judged", "weight"),
    [
        # The environment's own reward is measured, and not trained on.
        ("pairs", "reward_model", 0),
        ("steps", "process_reward", 1),
    ],
)
def test_the_policy_takes_the_reward_model_of_the_recipe_before_it(
    judge, judged, weight
):
    trained = reward.PROGRAM.recipes[judge]()
    reward.PROGRAM.check(trained)
    policy = PROGRAM.recipes[judged]()
    assert policy.reward.model == f"{trained.run_dir}/model"
    assert policy.reward.environment_weight == weight


def test_of_the_mixture_each_part_is_shown_by_its_weight():
    _, environment, tasks = opened("mixture")
    names = [part.name for part in environment.parts]
    assert names == ["largest", "instructions"]
    parts = [names[task.data["part"]] for task in tasks.train]
    assert [parts.count(name) for name in names] == [67, 133]


def test_the_sums_are_those_that_are_generated():
    assert QUESTIONS.read_text(encoding="utf-8") == questions()


def test_no_held_out_sum_is_trained_on_in_either_order():
    config, environment, _ = opened("sums")
    assert str(QUESTIONS) == config.data.path
    terms = {}
    for split in ("train", "eval"):
        for task in environment.tasks(split):
            [prompt] = task.messages
            first, second = map(int, re.findall(r"\d+", prompt.content))
            assert {len(str(first)), len(str(second))} == {2}
            assert task.reference == str(first + second)
            terms.setdefault(split, []).append(frozenset((first, second)))
    assert len(terms["train"]) + len(terms["eval"]) == 1280
    assert not {*terms["train"]} & {*terms["eval"]}
    assert len(terms["eval"]) >= config.eval.num_tasks


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("85", 1.0),
        ("47 + 38 = 85.", 1.0),
        ("The sum of 47 and 38 is **85**!", 1.0),
        ("85, since 47 + 38", 0.0),
        ("eighty-five", 0.0),
        ("185", 0.0),
    ],
)
def test_the_last_number_of_an_answer_counts(said, reward):
    _, environment, _ = opened("sums")
    task = Task(0, (Message("user", "?"),), "85", {"answer": 85, "solution": None})
    told = (*task.messages, Message("assistant", said))
    assert environment.step(task, told).reward == reward


def test_without_its_model_the_command_that_makes_it_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert grpo.main(["--recipe=sums"]) == 1
    assert "`make smollm2` makes it" in capsys.readouterr().out
    (tmp_path / MODEL).mkdir(parents=True)
    config = PROGRAM.recipes["sums"]()
    PROGRAM.check(config)
    assert config.run_dir == "runs/sums"


def test_sums_take_a_model_of_the_hub_at_their_own_learning_rate():
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config = read_options(PROGRAM, ["--recipe=sums", f"--model={name}"])
    PROGRAM.check(config)
    assert (config.model, config.optimizer.learning_rate) == (name, 1e-5)
    with pytest.raises(ValueError, match="learning-rate: must be given"):
        read_options(PROGRAM, ["--recipe=demo", f"--model={name}"])
