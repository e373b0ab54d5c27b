"""Joins the parts of a run that samples to its trainer."""

import functools
from typing import TYPE_CHECKING, Any

from jaxrl_post.algorithms import Algorithm
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.horizon import CRITIC, POLICY, PRM, optimizer_steps
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.envs import Environment
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.learner.companion import Companion, CompanionName, open_companion
from jaxrl_post.learner.learner import Learner, begin_training
from jaxrl_post.learner.model import Model
from jaxrl_post.learner.reference import Sync, beside_teacher, open_reference
from jaxrl_post.learner.state import TrainState
from jaxrl_post.learner.updater import Updater, longest_sequence
from jaxrl_post.programs.build.devices import split_devices
from jaxrl_post.programs.build.engine import exact_tile
from jaxrl_post.programs.build.judge import open_judge
from jaxrl_post.programs.experience import Experience, make_buffer
from jaxrl_post.programs.rl import Apart, Colocated, Imitated, OnlineTrainer
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.records.timeline import Timeline
from jaxrl_post.rollout.ahead import Ahead, SampledBatch
from jaxrl_post.rollout.buffer import Buffer
from jaxrl_post.rollout.collector import Collector
from jaxrl_post.rollout.events import silent
from jaxrl_post.sampler.port import Sampler

if TYPE_CHECKING:
    # It needs the extra serve.
    from jaxrl_post.programs.apart.remote import Remote

__all__ = ["make_trainer", "make_updater"]


def make_updater(
    config: RLConfig,
    model: Model,
    algorithm: Algorithm,
    environment: Environment,
    *,
    begun: tuple[Learner, TrainState] | None = None,
) -> Updater:
    """Makes what trains the policy, the models next to it, and its reference.

    Args:
        config: of the run.
        model: to train.
        algorithm: says which parts are needed.
        environment: for messages.
        begun: learner and state of the policy, if they were made before.

    Raises:
        ConfigError: a model cannot be opened.
    """
    steps, longest = optimizer_steps(config), longest_sequence(config)
    begin = functools.partial(
        begin_training,
        update=config.update,
        temperature=config.rollout.temperature,
        kernels=config.kernels,
    )
    companions: dict[CompanionName, Companion] = {}
    known: dict[CompanionName, tuple[Any, CriticConfig | PrmConfig, str]] = {
        "critic": (algorithm.value_objective, config.critic, CRITIC),
        "prm": (algorithm.prm_objective, config.prm, PRM),
    }
    for name, (objective, options, option) in known.items():
        if objective is None:
            continue
        opened = open_companion(options, model, seed=config.seed, longest=longest)
        made = begin(opened, objective, options.optimizer, num_steps=steps[option])
        companions[name] = Companion(name, opened, *made)
    learner, state = begun or begin(
        model,
        algorithm.objective,
        config.optimizer,
        num_steps=steps[POLICY],
        exact=exact_tile(config),
        replay=config.rollout.router_replay,
    )
    reference, chosen = None, config.algorithm
    if algorithm.needs_reference or algorithm.divergence is not None:
        reference = open_reference(
            model,
            learner,
            chosen.reference,
            "--algorithm.reference",
            longest=longest,
            sync=Sync(chosen.reference_sync_steps, chosen.reference_mixup),
        )
    if reference is not None and algorithm.divergence is not None:
        learner = beside_teacher(
            learner,
            reference,
            algorithm.divergence,
            temperature=config.distill.temperature,
        )
    return Updater(
        config=config,
        model=model,
        algorithm=algorithm,
        learner=learner,
        state=state,
        reference=reference,
        **companions,
        environment=environment.name,
    )


def make_trainer(
    updater: Updater,
    environment: Environment,
    collector: Collector,
    weights: "Colocated | Apart | Remote",
    *,
    demonstrations: Demonstrations | None = None,
    directory: RunDirectory | None = None,
) -> OnlineTrainer:
    """Makes the trainer of a run that samples.

    Args:
        updater: with the config, the model and the algorithm of the run.
        environment: has the tasks.
        collector: runs episodes.
        weights: hands the parameters to the samplers.
        demonstrations: to train on instead of episodes; None for episodes.
        directory: of the run; None to log no samples.

    Raises:
        ConfigError: the reward model cannot be opened.
    """
    config, model, algorithm = updater.config, updater.model, updater.algorithm
    size = len(environment.tasks("train"))
    if demonstrations is not None:
        size = demonstrations.size("train")
    by_part = algorithm.reads == "components"
    timeline = None if directory is None else Timeline(directory.timeline)
    tell = silent if timeline is None else timeline.tell
    judges = split_devices(config).judge if config.reward.mesh else None
    experience = Experience(
        config=config,
        environment=environment,
        stop_ids=model.tokenizer.stop_ids,
        collector=collector,
        indices=task_indices(size, config.seed),
        greedy=algorithm.reads == "greedy",
        by_part=by_part,
        judge=open_judge(
            config.reward,
            mesh=model.mesh if judges is None else judges,
            rules=model.rules,
            dtype=model.dtype,
            now=model.tokenizer.now,
        ),
        tell=tell,
    )
    weights.tell = tell
    if demonstrations is None:
        queue = make_buffer(config, by_part=by_part)
        ahead = None
        if config.samplers or config.rollout.ahead:
            ahead = Ahead(
                functools.partial(_sampled, experience, queue),
                config.rollout.ahead,
                config.steps,
                beside=bool(config.samplers),
                tell=tell,
            )
        return OnlineTrainer(
            ahead or queue,
            updater,
            weights=weights,
            producer=ahead or experience,
            experience=experience,
            queue=queue,
            ahead=ahead,
            directory=directory,
            timeline=timeline,
        )
    rollout = config.rollout
    count = rollout.prompts_per_step * rollout.samples_per_prompt
    return OnlineTrainer(
        Imitated(demonstrations, experience, model, count),
        updater,
        weights=weights,
        experience=experience,
        directory=directory,
    )


def _sampled(
    experience: Experience, queue: Buffer, sampler: Sampler, number: int
) -> SampledBatch:
    """The batch of a step; groups that are left over wait in the queue."""
    metrics = experience.feed(queue, sampler, number)
    return SampledBatch(queue.take(), metrics)
