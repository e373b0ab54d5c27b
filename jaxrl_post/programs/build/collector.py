"""Opens what runs and judges episodes: worker processes, and a collector over them."""

import contextlib
from collections.abc import Iterator

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.codec import Codec
from jaxrl_post.envs import AgentEnvironment, Environment, WorkerPool
from jaxrl_post.envs.workers.hosts import open_hosts
from jaxrl_post.learner.model import Model
from jaxrl_post.programs.build.agents import open_agents
from jaxrl_post.rollout.collector import Collector
from jaxrl_post.rollout.dialogue import Dialogue
from jaxrl_post.rollout.flight import EpisodeLimits
from jaxrl_post.sampler.port import Sampler

__all__ = ["make_collector", "open_collector", "open_judges"]


@contextlib.contextmanager
def open_judges(
    rollout: RolloutConfig, environment: Environment
) -> Iterator[WorkerPool]:
    """The environment in worker processes, here or on other machines.

    Args:
        rollout: `judges`, and the options in `reward_`.
        environment: judges the answers.
    """
    with (
        open_hosts(rollout.judges, rollout.reward_cpus) as make_worker,
        WorkerPool(
            environment,
            rollout.reward_workers,
            deadline_s=rollout.reward_deadline_s,
            memory_limit_gib=rollout.reward_memory_gib,
            make_worker=make_worker,
        ) as judges,
    ):
        yield judges


@contextlib.contextmanager
def open_collector(
    config: RLConfig,
    model: Model,
    environment: Environment,
    judges: WorkerPool,
    sampler: Sampler,
) -> Iterator[Collector]:
    """The collector of a run; with the server that agents call, if there are any.

    Args:
        config: of the run; `check_agents` has accepted it.
        model: the trained model.
        environment: without tasks that were left out.
        judges: run the environment.
        sampler: the run's, without parameters.

    Raises:
        ConfigError: as `open_agents`.
    """
    if not isinstance(environment, AgentEnvironment):
        yield make_collector(config.rollout, model, judges)
        return
    with open_agents(config, model, judges, sampler) as agents:
        yield Collector(agents, config.rollout.deadline_s)


def make_collector(
    rollout: RolloutConfig, model: Model, judges: WorkerPool
) -> Collector:
    """Makes a collector of our own dialogue.

    Args:
        rollout: how samples are drawn.
        model: has the tokenizer.
        judges: run the environment.
    """
    dialogue = Dialogue(
        codec=Codec(model.tokenizer, rollout.max_result_tokens),
        judges=judges,
        limits=EpisodeLimits(rollout.max_turns, rollout.max_prompt_tokens),
        grace_s=rollout.reward_grace_s if rollout.partial else 0.0,
    )
    return Collector(dialogue, rollout.deadline_s)
