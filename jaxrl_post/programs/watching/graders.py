"""Held-out graders: judge a run's answers by another measure than its reward.

A policy that exploits its reward earns more and more while such a grader finds its
answers no better, or worse. What a grader says trains nothing.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from jaxrl_post.config.checks import read_grader
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.envs import AgentEnvironment, Answer, Environment, Message, WorkerPool
from jaxrl_post.envs.env import Split
from jaxrl_post.envs.workers.interface import Judgement
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.programs.build.collector import open_judges
from jaxrl_post.rollout.episode import Episode
from jaxrl_post.sharding import processes

__all__ = ["Graders", "open_graders"]

_LOGGER = logging.getLogger(__name__)

# Tasks of each split that are compared when a grader is opened.
COMPARED = 16
# Most worker processes of a grader.
WORKERS = 2


@dataclasses.dataclass(frozen=True)
class HeldOutGrader:
    """A grader with its worker processes.

    Attributes:
        name: of the grader.
        environment: judges; it has the tasks of the run's environment.
        judges: run it.
    """

    name: str
    environment: Environment
    judges: WorkerPool


@dataclasses.dataclass(frozen=True)
class Graders:
    """The held-out graders of a run.

    Attributes:
        graders: all of them.
        most: most training samples of a step that are graded.
    """

    graders: Sequence[HeldOutGrader] = ()
    most: int = 0

    def trained(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Grades some samples of a step, evenly chosen.

        Args:
            episodes: that were judged.

        Returns:
            `grader/<name>`, the mean score; `grader_gap/<name>`, the mean reward of the
            same samples minus it; `grader_failed/<name>`, the share of answers that
            could not be graded.
        """
        if not self.graders or not self.most:
            return {}
        judged = [each for each in episodes if each.reward is not None]
        every = max(1, -(-len(judged) // self.most))
        chosen, found = judged[::every], dict[str, float]()
        for grader in self.graders:
            scores = _graded(grader, "train", chosen)
            pairs = [
                (each.reward or 0.0, score)
                for each, score in zip(chosen, scores, strict=True)
                if score is not None
            ]
            found[f"grader_failed/{grader.name}"] = 1 - len(pairs) / max(len(chosen), 1)
            if pairs:
                mean = sum(score for _, score in pairs) / len(pairs)
                reward = sum(reward for reward, _ in pairs) / len(pairs)
                found[f"grader/{grader.name}"] = mean
                found[f"grader_gap/{grader.name}"] = reward - mean
        return found

    def evaluated(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Grades the answers to held-out tasks: `eval/grader/<name>`."""
        found = dict[str, float]()
        for grader in self.graders:
            judged = [each for each in episodes if each.reward is not None]
            scores = [s for s in _graded(grader, "eval", judged) if s is not None]
            if scores:
                found[f"eval/grader/{grader.name}"] = sum(scores) / len(scores)
        return found


@contextlib.contextmanager
def open_graders(config: RLConfig, environment: Environment) -> Iterator[Graders]:
    """Opens the graders of `eval.graders`.

    Args:
        config: of the run.
        environment: of the run.

    Raises:
        ConfigError: a grader cannot be read or opened, is an environment of agents, or
            has other tasks than the run.
    """
    rollout = dataclasses.replace(
        config.rollout, reward_workers=min(WORKERS, config.rollout.reward_workers)
    )
    if processes.index():
        # Process 0 grades for all.
        yield Graders()
        return
    with contextlib.ExitStack() as stack:
        graders = list[HeldOutGrader]()
        for text in config.eval.graders:
            name, spec = read_grader(text)
            try:
                grader = make_environment(spec, config.data)
            except ConfigError as error:
                raise ConfigError(f"--eval.graders {name}: {error}") from error
            if isinstance(grader, AgentEnvironment):
                raise ConfigError(
                    f"--eval.graders {name}: {spec} is an environment of agents, which "
                    "makes its own requests; take one that judges an answer"
                )
            _check_tasks(name, grader, environment)
            judges = stack.enter_context(open_judges(rollout, grader))
            graders.append(HeldOutGrader(name, grader, judges))
        yield Graders(graders, config.eval.graded_samples)


def _check_tasks(name: str, grader: Environment, environment: Environment) -> None:
    """Refuses a grader whose first tasks are others than the run's."""
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        ours, theirs = environment.tasks(split), grader.tasks(split)
        if len(ours) != len(theirs):
            raise ConfigError(
                f"--eval.graders {name}: must have the tasks of --env; it has "
                f"{len(theirs):,} {split} tasks, and {environment.name} has "
                f"{len(ours):,}"
            )
        for at in range(min(COMPARED, len(ours))):
            if _asked(ours[at].messages) != _asked(theirs[at].messages):
                raise ConfigError(
                    f"--eval.graders {name}: must have the tasks of --env; {split} "
                    f"task {at} asks {_asked(theirs[at].messages)!r:.80}, and "
                    f"{environment.name} asks {_asked(ours[at].messages)!r:.80}"
                )


def _asked(messages: Sequence[Message]) -> list[str]:
    """The messages of the user; messages of the system may name tools."""
    return [str(each.content) for each in messages if each.role == "user"]


def _graded(
    grader: HeldOutGrader, split: Split, episodes: Sequence[Episode]
) -> list[float | None]:
    """The scores of answers, each judged once, as it ends; None where that failed."""
    tasks = grader.environment.tasks(split)
    futures = list[Future[Judgement]]()
    for number, episode in enumerate(episodes):
        task = tasks[episode.task_id]
        talk: tuple[Message, ...] = task.messages
        for place, turn in enumerate(episode.turns):
            if place:
                talk += turn.messages or (Message("user", turn.heard),)
            size = len(turn.sampled)
            answer = turn.said or Answer("assistant", turn.text, num_tokens=size)
            talk += (answer,)
        futures.append(grader.judges.submit(task, talk, number))
    found, failed = list[float | None](), None
    for number, future in enumerate(futures):
        # The pool ends each judgement at its deadline, so this ends.
        outcome = future.result()
        grader.judges.end(number)
        found.append(None if outcome.step is None else float(outcome.step.reward))
        failed = failed or (outcome if outcome.step is None else None)
    if failed is not None:
        _LOGGER.warning(
            "--eval.graders %s: an answer could not be graded: %s: %s",
            grader.name,
            failed.kind,
            (failed.error or "").strip().rpartition("\n")[2],
        )
    return found
