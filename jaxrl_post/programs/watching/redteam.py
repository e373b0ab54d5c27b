"""Tests the reward of an environment with adversarial answers."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import RedteamConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.replies import THINK, THOUGHT
from jaxrl_post.envs import AgentEnvironment, Answer, Environment, Message, Task
from jaxrl_post.envs.workers.interface import Judgement
from jaxrl_post.envs.workers.pool import WorkerPool
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.files import replace_file
from jaxrl_post.programs.build.collector import open_judges
from jaxrl_post.programs.watching.answering import AnswerServer, open_answers
from jaxrl_post.watch import ATTACKS, Earned, EpisodeReward, earned, known_tasks

__all__ = ["WeakRewardError", "judged", "run_redteam"]


class WeakRewardError(ValueError):
    """Adversarial answers earn more from an environment than they should."""


def run_redteam(
    config: RedteamConfig, *, console: Console, command: str = ""
) -> list[Earned]:
    """Judges the answers of all attacks, prints a table, and writes the results.

    Args:
        config: the options.
        console: for the table.
        command: the command line, for the results.

    Returns:
        What each attack earned.

    Raises:
        ConfigError: an option makes no sense for the environment.
        WeakRewardError: an attack earned more than it should, or made a judgement fail.
    """
    environment = make_environment(config.env, config.data)
    agents = isinstance(environment, AgentEnvironment)
    if agents and config.judges != "local":
        raise ConfigError(
            f"--judges {config.judges}: the agents of {environment.name} call a server "
            "on this machine alone; drop the option"
        )
    try:
        every = environment.tasks(config.split)
    except ValueError as error:
        raise ConfigError(f"--split {config.split}: {error}") from error
    if not every:
        raise ConfigError(f"--env: {environment.name} has no {config.split} tasks")
    tasks = [every[at] for at in range(min(config.num_tasks, len(every)))]
    kinds = tuple(dict.fromkeys(attack.kind for attack in ATTACKS))
    unknown = [kind for kind in config.kinds if kind not in kinds]
    if unknown:
        raise ConfigError(
            f"--kinds: there is no kind {unknown[0]!r}; kinds are {', '.join(kinds)}"
        )
    wanted = config.kinds or kinds
    rollout = RolloutConfig(
        judges=config.judges,
        reward_cpus=config.reward_cpus,
        reward_workers=config.reward_workers,
        reward_deadline_s=config.reward_deadline_s,
        reward_memory_gib=config.reward_memory_gib,
    )
    with (
        open_judges(rollout, environment) as judges,
        open_answers() if agents else contextlib.nullcontext() as answers,
    ):
        found, right = earned(
            [attack for attack in ATTACKS if attack.kind in wanted],
            known_tasks(environment, tasks),
            lambda asked: judged(judges, asked, config, answers),
            solved_reward=config.solved_reward,
        )
    weak = [each for each in found if each.weak_beyond(config.tolerance)]
    shown = [each for each in right if each is not None]
    _print(console, environment, found, shown, config)
    if config.output is not None:
        told = _results(config, environment, found, shown, command)
        replace_file(Path(config.output), json.dumps(told, indent=2) + "\n")
    if weak:
        worst = max(weak, key=lambda each: (each.solved, len(each.failures)))
        raise WeakRewardError(
            f"{len(weak)} of {len(found)} attacks earn more than they should; the "
            f"worst is {worst.attack.kind} ({worst.attack.label})"
        )
    return found


def judged(
    judges: WorkerPool,
    asked: Sequence[tuple[Task, str]],
    config: RedteamConfig,
    answers: AnswerServer | None = None,
) -> list[EpisodeReward]:
    """Judges answers, each in an episode of its own; a few are in flight at a time.

    Args:
        judges: run the environment.
        asked: tasks, each with the answer of every turn.
        config: the options.
        answers: serves the answers to agents; None if there are none. An agent makes
            as many calls as it likes, within the deadline of a judgement.
    """
    found: list[EpisodeReward | None] = [None] * len(asked)
    waiting = iter(enumerate(asked))
    flights: dict[Future[Judgement], Iterator[Future[Judgement]]] = {}

    def episode(number: int, task: Task, text: str) -> Iterator[Future[Judgement]]:
        """Yields the judgements that an episode waits for."""
        if answers is not None:
            task = answers.told(number, task, text)
        talk: tuple[Message, ...] = task.messages
        answer = _answer(task, text, config.max_tokens)
        total, turns = 0.0, 0
        try:
            while turns < config.max_turns:
                talk = (*talk, answer)
                future = judges.submit(task, talk, number)
                yield future
                outcome, turns = future.result(), turns + 1
                if outcome.step is None:
                    kind, error = outcome.kind, outcome.error
                    found[number] = EpisodeReward(None, turns, kind, error)
                    return
                total += outcome.step.reward
                total += sum((outcome.step.players or {}).values())
                talk = (*talk, *outcome.step.messages)
                if outcome.step.done:
                    break
        finally:
            judges.end(number)
        found[number] = EpisodeReward(total, turns)

    def begin() -> None:
        for number, (task, text) in waiting:
            steps = episode(number, task, text)
            flights[next(steps)] = steps
            return

    for _ in range(4 * config.reward_workers):
        begin()
    while flights:
        # The pool ends each judgement at its deadline, so this ends.
        done, _ = wait(flights, return_when=FIRST_COMPLETED)
        for future in done:
            steps = flights.pop(future)
            following = next(steps, None)
            if following is None:
                begin()
            else:
                flights[following] = steps
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def _answer(task: Task, text: str, num_tokens: int) -> Answer:
    """An answer as a run reads it: of a task with tools, without its thoughts."""
    reasoning = None
    if task.tools and text.lstrip().startswith(THINK):
        before, mark, after = text.partition(THOUGHT)
        reasoning, text = before.replace(THINK, "", 1), after if mark else ""
    return Answer("assistant", text, reasoning=reasoning, num_tokens=num_tokens)


def _print(
    console: Console,
    environment: Environment,
    found: Sequence[Earned],
    right: Sequence[EpisodeReward],
    config: RedteamConfig,
) -> None:
    """Prints what each kind of attacks earned, the strongest of each by name."""
    table = Table(title=f"{environment.name}: rewards of adversarial answers")
    for name in ("attack", "strongest", "mean reward", "solved", "may solve", ""):
        table.add_column(
            name, justify="left" if name in ("attack", "strongest") else "right"
        )
    rewards = [each.reward for each in right if each.reward is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        failed = len(right) - len(rewards)
        told = f"{failed} failed" if failed else ""
        table.add_row("right answer", "", f"{mean:.3f}", "", "", told)
    kinds: dict[str, list[Earned]] = {}
    for each in found:
        kinds.setdefault(each.attack.kind, []).append(each)
    for kind, members in kinds.items():
        judged = [each for each in members if each.tasks]
        weak = [each for each in judged if each.weak_beyond(config.tolerance)]
        if not judged:
            table.add_row(kind, "no right answer is known", "", "", "", "left out")
            continue
        worst = max(weak or judged, key=lambda each: (each.solved, each.mean))
        verdict = f"{len(weak)} of {len(judged)} weak" if weak else "ok"
        failed = sum(len(each.failures) for each in judged)
        table.add_row(
            kind,
            worst.attack.label,
            f"{worst.mean:.3f}",
            f"{worst.solved} of {worst.tasks}",
            f"{worst.honest}",
            verdict + (f", {failed} failed" if failed else ""),
        )
    console.print(table)


def _results(
    config: RedteamConfig,
    environment: Environment,
    found: Sequence[Earned],
    right: Sequence[EpisodeReward],
    command: str,
) -> dict[str, Any]:
    """The results as JSON."""
    return {
        "command": command,
        "environment": environment.name,
        "split": config.split,
        "right": [each.reward for each in right],
        "attacks": [
            {
                "kind": each.attack.kind,
                "label": each.attack.label,
                "tasks": each.tasks,
                "mean_reward": each.mean,
                "solved": each.solved,
                "may_solve": each.honest,
                "weak": each.weak_beyond(config.tolerance),
                "failures": {
                    str(task): f"{outcome.failure}: {outcome.error}"
                    for task, outcome in each.failures.items()
                },
            }
            for each in found
        ],
    }
