"""A trainer around a model of a few thousand parameters, cheap to make again."""

import functools
import io
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxrl_post import models
from jaxrl_post.algorithms import Algorithm
from jaxrl_post.config.algorithm import AlgorithmConfig, DistillConfig
from jaxrl_post.config.offline import PreferenceConfig, SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Environment, WorkerPool
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.learner import state as training
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.learner.learner import Learner, begin_training
from jaxrl_post.learner.model import Model
from jaxrl_post.models import ModelConfig
from jaxrl_post.programs.build import trainer as build
from jaxrl_post.programs.build.collector import make_collector
from jaxrl_post.programs.build.engine import exact_tile, make_engine
from jaxrl_post.programs.build.layouts import sampler_layout
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.rl import Colocated, OnlineTrainer
from jaxrl_post.programs.run import RunResult
from jaxrl_post.rollout.episode import Episode
from jaxrl_post.sampler import Engine
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from jaxrl_post.types import TokenBatch

CONFIG = ModelConfig(
    "llama", 264, 16, 24, 1, num_heads=2, num_kv_heads=2, max_length=64
)
RL = RLConfig(
    env="coin:Coin",
    rollout=RolloutConfig(
        prompts_per_step=4,
        samples_per_prompt=4,
        max_prompt_tokens=16,
        max_tokens=4,
        truncated="reward",  # Untrained models stop by chance.
    ),
    update=UpdateConfig(microbatch_tokens=384),
    optimizer=OptimizerConfig(learning_rate=3e-3),
    eval=EvalConfig(num_tasks=6),
)


def make_model() -> Model:
    mesh = create_mesh("dp1", jax.devices()[:1])
    specs = models.param_specs(CONFIG)
    params = models.initialize(
        jax.random.key(0), specs, jnp.float32, mesh, DEFAULT_RULES
    )
    texts = [f"train {i}=" for i in range(9)]
    tokenizer = Tokenizer.train(texts, vocab_size=CONFIG.vocab_size)
    return Model(
        "tiny", CONFIG, specs, params, tokenizer, mesh, DEFAULT_RULES, preset=False
    )


class Watched(Learner):
    """Remembers the batches of its updates."""

    @functools.cached_property
    def seen(self) -> list[tuple[str, TokenBatch]]:
        return []

    def update(
        self, state: training.TrainState, batch: TokenBatch, *, where: str, **options
    ) -> tuple[training.TrainState, dict[str, float]]:
        self.seen.append((where, batch))
        return super().update(state, batch, where=where, **options)


@functools.cache
def _parts(
    algorithm: AlgorithmConfig,
    distill: DistillConfig,
    prm: PrmConfig,
    exact: bool,
    kept_ids: int,
) -> tuple[Algorithm, Watched, Engine]:
    """Compiled parts: made once for every algorithm."""
    model = make_model()
    tile = exact_tile(replace(RL, exact=exact))
    made = make_algorithm(algorithm, RL.rollout.max_tokens, distill=distill, prm=prm)
    learner, _ = begin_training(
        model, made.objective, RL.optimizer, RL.update, num_steps=100, exact=tile
    )
    watched = Watched(**{f.name: getattr(learner, f.name) for f in fields(learner)})
    weights = sampler_layout(RL.rollout, model)
    engine = make_engine(
        RL.rollout, model, weights, seed=0, exact=tile, kept_ids=kept_ids
    )
    return made, watched, engine


def make_trainer(
    environment: Environment, judges: WorkerPool, config: RLConfig = RL
) -> OnlineTrainer:
    """A trainer at step 0. Sizes and optimizer must equal RL's."""
    algorithm, learner, engine = _parts(
        config.algorithm, config.distill, config.prm, config.exact, config.kept_ids
    )
    model = make_model()
    jax.set_mesh(learner.mesh)
    state = training.create(model.params, learner.optimizer, learner.layout)
    # The reference and the teacher are the model itself.
    options = replace(config.algorithm, reference=None)
    config = replace(config, algorithm=options)
    demonstrations = None
    if config.distill.data == "demonstrations":
        demonstrations = Demonstrations(environment, 24)
    updater = build.make_updater(
        config, model, algorithm, environment, begun=(learner, state)
    )
    return build.make_trainer(
        updater,
        environment,
        make_collector(config.rollout, model, judges),
        Colocated(engine, sampler_layout(config.rollout, model), updater),
        demonstrations=demonstrations,
    )


def changed(section: str, **values) -> RLConfig:
    """RL with other values in one of its sections."""
    return replace(RL, **{section: replace(getattr(RL, section), **values)})


def with_last_turn(episode: Episode, **changes) -> Episode:
    """The episode with another last turn."""
    last = replace(episode.turns[-1], **changes)
    return replace(episode, turns=(*episode.turns[:-1], last))


def host(tree) -> list[np.ndarray]:
    """Copies of the leaves of a tree."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(left, right) -> None:
    """Two trees are equal to the last bit."""
    for one, other in zip(host(left), host(right), strict=True):
        np.testing.assert_array_equal(one, other)


def go_on(config: PreferenceConfig | SFTConfig) -> tuple[RunResult, str]:
    """Begins or continues an offline run; returns what it printed."""
    out = io.StringIO()
    console = Console(file=out, width=1000)
    return run_offline(config, console=console, command=""), out.getvalue()
