"""Checks a run's options against the attributes of its algorithm."""

from jaxrl_post.algorithms import Algorithm
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig

__all__ = ["check_run"]

# Rollout options that do not apply to evaluations, which are greedy.
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "dynamic_sampling", "overlong_buffer",
)  # fmt: skip


def check_run(config: RLConfig, algorithm: Algorithm) -> None:
    """Refuses options that the algorithm contradicts.

    Args:
        config: of the run.
        algorithm: which `make_algorithm` made of it.

    Raises:
        ConfigError: names the option.
    """
    name, rollout, update = config.algorithm.name, config.rollout, config.update
    if rollout.samples_per_prompt < 2 and algorithm.compares_samples:
        raise ConfigError(
            f"--rollout.samples-per-prompt: {name} compares the samples of a prompt, "
            f"so it must be at least 2; got {rollout.samples_per_prompt}"
        )
    if update.minibatches * update.epochs > 1 and not algorithm.has_ratio:
        raise ConfigError(
            f"--update.minibatches, --update.epochs: {name} weighs no token by how far "
            "the policy has moved since it was sampled, so a batch serves one update; "
            f"got {update.minibatches} and {update.epochs}. Use 1 and 1, or an "
            "algorithm with a ratio, such as grpo"
        )
    if rollout.overlong_buffer and algorithm.positive_rewards:
        raise ConfigError(
            f"--rollout.overlong-buffer: {name} divides by a prompt's mean reward, "
            "which a penalty brings to 0 and below; drop the option, or use another "
            "algorithm"
        )
    if rollout.partial and algorithm.reads == "greedy":
        raise ConfigError(
            f"--rollout.partial: {name} compares with a greedy answer of the same "
            "parameters; drop the option, or use another algorithm"
        )
    if algorithm.reads == "components":
        _check_parts(config)
    if algorithm.has_teacher:
        _check_teacher(config)
    _check_turns(config, algorithm)


def _check_teacher(config: RLConfig) -> None:
    """Refuses options that have no effect on a student."""
    if config.exact:
        raise ConfigError(
            f"--exact: {config.algorithm.name} has no ratio of trainer and sampler; "
            "drop the option"
        )
    unused, why = ("overlong_buffer",), "rewards teach a student nothing"
    if config.distill.data == "demonstrations":
        unused, why = SAMPLING, "nothing is sampled but in evaluations, greedily"
    defaults = RolloutConfig()
    for option in unused:
        if getattr(config.rollout, option) != getattr(defaults, option):
            raise ConfigError(
                f"--rollout.{option.replace('_', '-')}: with --distill.data "
                f"{config.distill.data} {why}; drop the option"
            )


def _check_parts(config: RLConfig) -> None:
    """Refuses options of the whole reward, as the algorithm reads its parts."""
    name = config.algorithm.name
    if config.rollout.overlong_buffer:
        raise ConfigError(
            f"--rollout.overlong-buffer: {name} reads the parts of the reward, and "
            f"the penalty is no part; got {config.rollout.overlong_buffer}. Drop the "
            "option, give the environment a criterion of length (envs.rubric), or use "
            "another algorithm"
        )
    for option in ("weight", "environment_weight"):
        weight = getattr(config.reward, option)
        if weight != getattr(RewardModelConfig, option):
            raise ConfigError(
                f"--reward.{option.replace('_', '-')}: {name} reads each part of the "
                f"reward by itself, without its factor; got {weight:g}. Drop the "
                "option and give --algorithm.reward-weights, such as environment=1 "
                "model=0.5, or use another algorithm"
            )


def _check_turns(config: RLConfig, algorithm: Algorithm) -> None:
    """Refuses options of turns' credit that the algorithm does not support."""
    options, name = config.algorithm, config.algorithm.name
    if options.turn_credit == "turns" and algorithm.turn_credit == "outcome":
        raise ConfigError(
            f"--algorithm.turn-credit turns: {name} looks at more of an episode than "
            "its rewards, or at less; use outcome, or an algorithm such as grpo"
        )
    if options.turn_credit == "turns" and algorithm.turn_credit == "averages":
        raise ConfigError(
            f"--algorithm.turn-credit turns: {name} has one ratio for a sequence, "
            "in which the credit of its turns averages out; use outcome, or an "
            "algorithm such as grpo or gspo"
        )
    if options.turn_discount != 1.0 and algorithm.turn_credit == "rewards":
        raise ConfigError(
            f"--algorithm.turn-discount: {name} discounts by the token; use "
            "--critic.gamma for ppo, or drop the option"
        )
