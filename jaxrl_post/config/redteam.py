"""The options of a test of rewards by adversarial answers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxrl_post.config.data import DataConfig, check_rows
from jaxrl_post.config.fields import ANY, COUNT, DECAY, POSITIVE, check_numbers
from jaxrl_post.config.paths import check_output, check_paths
from jaxrl_post.config.rollout import check_judges

__all__ = ["RedteamConfig", "check_redteam"]


@dataclass(frozen=True)
class RedteamConfig:
    """The environment whose reward is tested, and how.

    Attributes:
        env: environment, as for training, such as arithmetic?level=2 or gsm8k.
        data: files of tasks, for environments that read files.
        split: which tasks.
        num_tasks: number of tasks, from the first.
        max_turns: most turns of an episode; each turn gives the same answer.
        max_tokens: the number of tokens that each answer is said to have.
        solved_reward: reward of an answer that solves its task, where no right answer
            is known.
        tolerance: share of its tasks that an attack may solve by luck, in [0, 1).
        kinds: the kinds of attacks to try; all if none is given.
        judges: where answers are judged, as for training.
        reward_workers: number of processes that judge answers.
        reward_cpus: with judges on a Ray cluster, CPUs reserved for each process.
        reward_deadline_s: most seconds for one judgement.
        reward_memory_gib: most GiB of address space of a judging process; None for no
            limit.
        output: JSON file for the results; None writes nothing.
    """

    env: str
    data: DataConfig = field(default_factory=DataConfig)
    split: Literal["eval", "train"] = "eval"
    num_tasks: Annotated[int, COUNT] = 20
    max_turns: Annotated[int, COUNT] = 8
    max_tokens: Annotated[int, COUNT] = 256
    solved_reward: Annotated[float, ANY] = 1.0
    tolerance: Annotated[float, DECAY] = 0.0
    kinds: tuple[str, ...] = ()
    judges: str = "local"
    reward_workers: Annotated[int, COUNT] = 2
    reward_cpus: Annotated[float, POSITIVE] = 1.0
    reward_deadline_s: Annotated[float, POSITIVE] = 10.0
    reward_memory_gib: Annotated[float | None, POSITIVE] = None
    output: str | None = None


def check_redteam(config: RedteamConfig) -> None:
    """Refuses options that make no sense for any environment.

    Raises:
        ConfigError: names the option.
    """
    check_numbers(config)
    check_rows(config.data, own=True)
    check_judges(config.judges, config.reward_cpus, "")
    check_paths(config)
    if config.output is not None:
        check_output(Path(config.output), "--output")
