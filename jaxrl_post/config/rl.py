"""The options of the programs that sample: grpo, ppo, distill."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.algorithm import AlgorithmConfig, DistillConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.fields import ANY, COUNT, FREE, NOT_NEGATIVE
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.reward_model import PrmConfig, RewardModelConfig
from jaxrl_post.config.rollout import FleetConfig, RolloutConfig, expected_samplers
from jaxrl_post.config.run import RunConfig

__all__ = ["MismatchConfig", "RLConfig"]

# Top-p, min-p and constraints keep any number of ids: 128 ids are 512 bytes per sampled
# token.
KEPT_IDS = 128


@dataclass(frozen=True)
class MismatchConfig:
    """Bounds on the difference of sampler and trainer with the same parameters.

    Both bounds are for mismatch/token_mult_prob_error, the mean factor by which they
    differ in the probability of a sampled token: 1 where they agree. Tokens that older
    parameters sampled do not count; a step with no other tokens is not compared and
    lacks the metric.

    Attributes:
        warn: value above which a warning is printed.
        stop: value above which the run ends, before the optimizer step.
    """

    warn: Annotated[float, COUNT] = 1.05
    stop: Annotated[float, COUNT] = 2.0


@dataclass(frozen=True)
class RLConfig(RunConfig):
    """Training of a policy on its own samples.

    The trainer is the part that computes losses and updates the policy.

    Attributes:
        env: arithmetic, calculate, code, facts, functions, gsm8k, guess,
            instructions, jsonl, judged, lookup, mixture, nemo-gym, nim, openenv,
            text2sql, verifiers, world, reasoning-gym:<task>, or <module>:<factory>,
            with options as in arithmetic?level=2 or jsonl?grader=math.
        tools: tools that the policy may call before it answers: python, shell (both run
            in the sandbox), search?corpus=FILE, mcp?command=["..."],
            http?url=...&tools=FILE, or <module>:<name> of a function or of functions.
            Needs `rollout.max_turns`.
        data: files of tasks, for environments that read files.
        log_samples: number of training completions logged at each evaluation.
        log_eval_samples: number of held-out completions logged at each evaluation.
        log_rollouts: file format in which all episodes of each step are written to the
            folder rollouts: parquet, one file a step; None to write none.
        algorithm: what is optimised, and its hyperparameters.
        critic: value model of ppo.
        prm: implicit reward model of prime.
        distill: how distillation compares student and teacher.
        reward: reward model that judges in addition to the environment.
        rollout: how samples are drawn and judged.
        samplers: number of samplers with devices of their own, which sample while the
            other devices train; each has as many of the last devices as `rollout.mesh`
            names, one without it. 0: sampling takes turns with training, on the same
            devices. any:N: samplers in other processes, on this or on other machines,
            each started by `python -m launch.serve --follow ADDRESS`; sampling begins
            when N of them are ready, and they may come and go. With `exact` the run is
            the same for any number.
        fleet: samplers in other processes.
        exact: the sampler's log-probs equal the trainer's to the last bit, for every
            batch, at the cost of speed: a run stops if any differs, and needs no pass
            for old log-probs. The sampler and the log-probs are then XLA programs;
            `kernels` then applies only to the gradients. Refused for rotary embeddings
            that depend on a sequence's length.
        mismatch: how far sampler and trainer may differ.
    """

    env: str = "arithmetic"
    tools: tuple[str, ...] = ()
    data: DataConfig = field(default_factory=DataConfig)
    log_samples: Annotated[int, NOT_NEGATIVE, FREE] = 8
    log_eval_samples: Annotated[int, NOT_NEGATIVE, FREE] = 8
    log_rollouts: Annotated[Literal["parquet"] | None, FREE] = None
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-6)
    )
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    prm: PrmConfig = field(default_factory=PrmConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    reward: RewardModelConfig = field(default_factory=RewardModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    samplers: Annotated[int | str, ANY, FREE] = 0
    fleet: Annotated[FleetConfig, FREE] = field(default_factory=FleetConfig)
    exact: bool = False
    mismatch: Annotated[MismatchConfig, FREE] = field(default_factory=MismatchConfig)

    @property
    def rounds_inputs(self) -> bool:
        """Whether a sampler with float8 weights rounds the inputs of products too.

        It does if training does, so that the two compute the same.
        """
        return self.update.precision == "float8"

    @property
    def own_samplers(self) -> int:
        """Number of samplers with devices of this process."""
        return self.samplers if isinstance(self.samplers, int) else 0

    @property
    def remote_samplers(self) -> int:
        """Number of samplers in other processes that a run waits for.

        Raises:
            ConfigError: `samplers` cannot be read.
        """
        return expected_samplers(self.samplers)

    @property
    def kept_ids(self) -> int:
        """Largest number of kept ids that are recorded per sampled token; 0 for none.

        Nothing is recorded for a token that was drawn from the whole vocabulary.

        >>> RLConfig(rollout=RolloutConfig(top_k=20)).kept_ids, RLConfig().kept_ids
        (20, 128)
        """
        if self.algorithm.support == "full":
            return 0
        return self.rollout.top_k or KEPT_IDS
