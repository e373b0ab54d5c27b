"""Checks of options against each other, before jax is imported.

`check_options` makes all of them for a training program. Checks that need the model or
the devices are made where these are opened.
"""

import importlib.util
import math
from pathlib import Path

from jaxrl_post.config.algorithm import AlgorithmConfig, CorrectionConfig, DistillConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import check_template
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import check_numbers
from jaxrl_post.config.horizon import check_schedules
from jaxrl_post.config.offline import OfflineConfig, RewardConfig, SFTConfig
from jaxrl_post.config.paths import check_paths, naming
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig, check_judges
from jaxrl_post.config.run import RunConfig
from jaxrl_post.mesh_spec import MeshError, read_mesh

__all__ = [
    "REWARD_A_TURN",
    "check_algorithm",
    "check_correction",
    "check_options",
    "reward_weights",
]

# Algorithms whose KL penalty is part of the reward, for which k1 is the estimator.
KL_IN_REWARD = ("ppo", "reinforce_plus_plus")
NO_CLIP = ("rloo", "sapo", "opo", "remax", "vespo")
NO_ENTROPY = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "distillation")
# Without a ratio, a second update of a batch would ignore what the first one changed.
NO_RATIO = ("rloo", "opo", "remax")
# Algorithms that do not compare the samples of a prompt with each other.
ONE_SAMPLE = ("ppo", "reinforce_plus_plus", "distillation", "remax")
# Algorithms whose advantages read more than a group's rewards, or something else.
NO_TURNS = ("gdpo", "opo", "remax", "distillation", "reinforce_plus_plus_baseline")
# Algorithms whose gradient is that of whole sequences: what single tokens or turns are
# worth averages out.
WHOLE_SEQUENCES = ("clipped_rloo", "gmpo")
# Algorithms that compute advantages per token, from rewards at single tokens.
REWARD_A_TURN = ("ppo", "reinforce_plus_plus")
NO_CRITIC = CriticConfig()
NO_TEACHER = DistillConfig()

# The bounds that each kind of correction has.
CORRECTION_BOUNDS = {
    "none": (),
    "truncated_tokens": ("cap",),
    "truncated_sequences": ("cap",),
    "icepop": ("low", "high"),
    "icepop_sequences": ("low", "high"),
    "masked_sequences": ("cap", "low", "high"),
}

# Options of --distill that belong to one divergence alone.
SERVES = {"beta": "jsd", "top_k": "top_k", "tail": "top_k"}
# Options of launch.reward that belong to one --kind alone.
OF_KIND = {"outcome": ("centering", "margin"), "process": ("separator",)}
# Rollout options that do not apply to evaluations, which are greedy.
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "dynamic_sampling", "overlong_buffer",
)  # fmt: skip


def check_options(config: RunConfig) -> None:
    """Refuses options that make no sense on any model and machine.

    Args:
        config: of a training program.

    Raises:
        ConfigError: names the option.
        MeshError: --mesh cannot be read.
    """
    check_numbers(config)
    check_template(config.template)
    check_schedules(config)
    _check_mesh(config.mesh, "--")
    for name in config.log:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log {name}: there is no module {name!r}: "
                f"pip install 'jaxrl_post[{name}]'"
            )
    if config.run_dir is not None and not config.run_dir.strip():
        raise ConfigError(
            "--run-dir: must name a directory; got an empty text. Drop the option to "
            "have one named after algorithm, environment and model"
        )
    with naming("--run-dir"):
        if config.run_dir is not None and Path(config.run_dir).is_file():
            raise ConfigError(f"--run-dir: {config.run_dir} is a file, not a directory")
    check_paths(config)
    if isinstance(config, RLConfig):
        _check_rl(config)
    if isinstance(config, OfflineConfig):
        _check_offline(config)


def check_algorithm(
    config: AlgorithmConfig, critic: CriticConfig, distill: DistillConfig
) -> None:
    """Refuses options of an algorithm that have no effect or contradict others.

    Raises:
        ConfigError: names the option.
    """
    _check_terms(config)
    _check_critic(config, critic)
    _check_distillation(config, distill)
    check_correction(config.correction)


def reward_weights(config: AlgorithmConfig) -> list[tuple[str, float]]:
    """Names and weights of the parts of the reward, as they were given.

    Raises:
        ConfigError: an entry is not NAME=WEIGHT, or a name occurs twice.

    >>> reward_weights(AlgorithmConfig(reward_weights=("own=1", "length=0.5")))
    [('own', 1.0), ('length', 0.5)]
    """
    found: dict[str, float] = {}
    for each in config.reward_weights:
        name, _, number = each.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or name in found or not math.isfinite(weight):
            raise ConfigError(
                "--algorithm.reward-weights: must be NAME=WEIGHT, each name once, such "
                f"as own=1 length=0.5; got {each!r}"
            )
        found[name] = weight
    return list(found.items())


def check_correction(config: CorrectionConfig) -> None:
    """Refuses bounds that a kind of correction does not have, and missing bounds.

    Raises:
        ConfigError: names the option.
    """
    bounds = {"cap": config.cap, "low": config.low, "high": config.high}
    given = {name for name, value in bounds.items() if value is not None}
    for name in sorted(given - set(CORRECTION_BOUNDS[config.kind])):
        raise ConfigError(
            f"--algorithm.correction.{name}: {config.kind} has no such bound; drop the "
            "option"
        )
    if config.kind == "masked_sequences" and None in (config.low, config.high):
        raise ConfigError(
            "--algorithm.correction.low, .high: masked_sequences needs both, bounds of "
            "the geometric mean of a sequence's weights; 0.5 and 2, for example"
        )


def _check_offline(config: OfflineConfig) -> None:
    if isinstance(config, RewardConfig):
        _check_kind(config)
        if config.warm_start.steps:
            raise ConfigError(
                "--warm-start.steps: a reward model has no output for tokens to warm "
                "up; start from a --model directory"
            )
    if isinstance(config, SFTConfig) and config.warm_start.steps:
        raise ConfigError(
            "--warm-start.steps: fine-tuning is what a warm start does; use --steps"
        )
    if config.update.minibatches != 1 or config.update.epochs != 1:
        raise ConfigError(
            "--update.minibatches, --update.epochs: must be 1 where every step reads "
            "examples of its own"
        )


def _check_kind(config: RewardConfig) -> None:
    """Refuses options of the other kind of reward model."""
    if not config.separator or "\\n" in config.separator:
        raise ConfigError(
            f"--separator: must not be empty, nor have a backslash before an n; got "
            f"{config.separator!r}. A shell writes a line break as $'\\n'"
        )
    for kind, names in OF_KIND.items():
        for name in names if kind != config.kind else ():
            value = getattr(config, name)
            if value != getattr(RewardConfig, name):
                raise ConfigError(
                    f"--{name}: is for --kind {kind} alone; got {value!r} with --kind "
                    f"{config.kind}; drop the option"
                )


def _check_rl(config: RLConfig) -> None:
    if config.exact:
        _check_exact(config)
    check_algorithm(config.algorithm, config.critic, config.distill)
    _check_mesh(config.rollout.mesh, "--rollout.")
    _check_idle(config)
    check_judges(config.rollout.judges, config.rollout.reward_cpus, "rollout.")
    if config.mismatch.warn > config.mismatch.stop:
        raise ConfigError(
            f"--mismatch.warn: must be at most --mismatch.stop, "
            f"{config.mismatch.stop:g}; got {config.mismatch.warn:g}"
        )
    _check_rollout(config)
    _check_turns(config)
    name, rollout, update = config.algorithm.name, config.rollout, config.update
    if rollout.samples_per_prompt < 2 and name not in ONE_SAMPLE:
        raise ConfigError(
            f"--rollout.samples-per-prompt: {name} compares the samples of a prompt, "
            f"so it must be at least 2; got {rollout.samples_per_prompt}"
        )
    if name in NO_RATIO and update.minibatches * update.epochs > 1:
        raise ConfigError(
            f"--update.minibatches, --update.epochs: {name} weighs no token by how far "
            "the policy has moved since it was sampled, so a batch serves one update; "
            "got "
            f"{update.minibatches} and {update.epochs}. Use 1 and 1, or an algorithm "
            "with a ratio, such as grpo"
        )
    if name == "gdpo":
        _check_parts(config)
    if config.reward.model is None and config.reward != RewardModelConfig():
        raise ConfigError(
            "--reward.*: there is no reward model; give --reward.model, or drop the "
            "options"
        )
    if name == "ppo" and config.critic.warmup_steps >= config.steps:
        raise ConfigError(
            f"--critic.warmup-steps: must be less than --steps, {config.steps}, or the "
            f"policy never learns; got {config.critic.warmup_steps}"
        )


def _check_mesh(text: str, section: str) -> None:
    try:
        read_mesh(text)
    except MeshError as error:
        raise MeshError(f"{section}{error}") from error


def _check_idle(config: RLConfig) -> None:
    """Refuses options that do nothing without another one."""
    algorithm, rollout, defaults = config.algorithm, config.rollout, RolloutConfig()
    needs = {
        "overlong_penalty": (rollout.overlong_buffer, "--rollout.overlong-buffer"),
        "max_draws": (rollout.dynamic_sampling, "--rollout.dynamic-sampling"),
        "guess_rows": (rollout.guesses, "--rollout.guesses"),
        "reward_grace_s": (rollout.partial, "--rollout.partial"),
        "max_result_tokens": (
            config.tools or rollout.max_turns > 1,
            "--rollout.max-turns above 1",
        ),
        "publish_mib": (
            rollout.mesh or rollout.dtype,
            "--rollout.mesh or --rollout.dtype",
        ),
    }
    for name, (there, other) in needs.items():
        value = getattr(rollout, name)
        if value != getattr(defaults, name) and not there:
            raise ConfigError(
                f"--rollout.{name.replace('_', '-')}: without {other} it changes "
                f"nothing; got {value:g}; drop the option, or give the other"
            )
    for name in ("kl_estimator", "kl_weights"):
        given = getattr(algorithm, name)
        if given is not None and not algorithm.kl_coefficient:
            raise ConfigError(
                f"--algorithm.{name.replace('_', '-')}: with "
                "--algorithm.kl-coefficient 0 no KL is estimated; got "
                f"{given}; drop the option, or give a coefficient"
            )


def _check_parts(config: RLConfig) -> None:
    """Refuses what changes the whole reward alone, of which gdpo sees the parts."""
    if config.rollout.overlong_buffer:
        raise ConfigError(
            "--rollout.overlong-buffer: gdpo normalises each part of the reward by "
            f"itself, and the penalty is no part; got {config.rollout.overlong_buffer}."
            " Drop the option, give the environment a criterion of length "
            "(envs.rubric), or use another algorithm"
        )
    for name in ("weight", "environment_weight"):
        weight = getattr(config.reward, name)
        if weight != getattr(RewardModelConfig, name):
            raise ConfigError(
                f"--reward.{name.replace('_', '-')}: gdpo normalises each part of the "
                f"reward by itself, whatever its factor; got {weight:g}. Drop the "
                "option and give --algorithm.reward-weights, such as environment=1 "
                "model=0.5, or use another algorithm"
            )


def _check_exact(config: RLConfig) -> None:
    """Refuses options that make sampler and trainer compute differently."""
    if config.algorithm.name == "distillation":
        raise ConfigError(
            "--exact: distillation has no ratio of trainer and sampler; drop the option"
        )
    if config.rollout.dtype not in (None, config.dtype):
        raise ConfigError(
            f"--rollout.dtype: with --exact the sampler computes as the trainer does; "
            f"got {config.rollout.dtype} beside --dtype {config.dtype}; drop the option"
        )
    if config.rollout.cache_dtype is not None:
        raise ConfigError(
            "--rollout.cache-dtype: with --exact the sampler computes as the trainer "
            f"does, which quantises no keys; got {config.rollout.cache_dtype}; drop "
            "one of the two"
        )
    if config.rollout.weights is not None:
        raise ConfigError(
            "--rollout.weights: with --exact the sampler computes with the trainer's "
            f"own matrices; got {config.rollout.weights}; drop one of the two"
        )


def _check_rollout(config: RLConfig) -> None:
    name, rollout = config.algorithm.name, config.rollout
    if rollout.weights is not None and config.lora.quantize is not None:
        raise ConfigError(
            "--rollout.weights: the base of the adapter is quantised already, by "
            f"--lora.quantize {config.lora.quantize}; got {rollout.weights}; drop one "
            "of the two"
        )
    if rollout.overlong_buffer > rollout.max_tokens:
        raise ConfigError(
            f"--rollout.overlong-buffer: must be at most --rollout.max-tokens, "
            f"{rollout.max_tokens}; got {rollout.overlong_buffer}"
        )
    if rollout.draft is not None and not rollout.guesses:
        raise ConfigError(
            f"--rollout.draft: {rollout.draft} guesses --rollout.guesses tokens in a "
            "pass, which are 0; give a number, such as 4, or drop the option"
        )
    if config.critic.bootstrap_truncated and rollout.truncated == "mask":
        raise ConfigError(
            "--critic.bootstrap-truncated: --rollout.truncated mask leaves the answers "
            "out that were cut; drop one of the two"
        )
    if name == "max_rl" and rollout.overlong_buffer:
        raise ConfigError(
            "--rollout.overlong-buffer: max_rl divides by a prompt's mean reward, "
            "which a penalty brings to 0 and below; drop the option, or use another "
            "algorithm"
        )
    if rollout.dynamic_sampling and rollout.samples_per_prompt < 2:
        raise ConfigError(
            "--rollout.dynamic-sampling: keeps the prompts whose samples differ in "
            "reward, and a single sample differs from none; drop the option, or raise "
            "--rollout.samples-per-prompt"
        )
    if name != "distillation":
        return
    unused = ("overlong_buffer",)
    why = "rewards teach a student nothing"
    if config.distill.data == "demonstrations":
        unused, why = SAMPLING, "nothing is sampled but in evaluations, greedily"
    defaults = RolloutConfig()
    for option in unused:
        if getattr(rollout, option) != getattr(defaults, option):
            raise ConfigError(
                f"--rollout.{option.replace('_', '-')}: with --distill.data "
                f"{config.distill.data} {why}; drop the option"
            )


def _check_turns(config: RLConfig) -> None:
    """Refuses options that contradict several turns, or `rollout.partial`."""
    algorithm, rollout = config.algorithm, config.rollout
    if config.tools and rollout.max_turns == 1:
        raise ConfigError(
            "--tools: with --rollout.max-turns 1 no turn follows a call; raise it to "
            "the most turns that an episode may have, the answer included"
        )
    if rollout.max_turns > 1 and not rollout.max_prompt_tokens:
        raise ConfigError(
            "--rollout.max-prompt-tokens: must be given with --rollout.max-turns "
            f"{rollout.max_turns}; it bounds the tokens of the conversation before the "
            "last turn"
        )
    if rollout.max_turns > 1 and config.reward.model is not None:
        raise ConfigError(
            "--reward.model: reads one answer to a task's prompt, not a conversation "
            f"of up to {rollout.max_turns} turns; drop the option, or take "
            "--rollout.max-turns 1"
        )
    if algorithm.turn_credit == "turns":
        if rollout.max_turns == 1:
            raise ConfigError(
                "--algorithm.turn-credit turns: with --rollout.max-turns 1 there is "
                "one turn to credit; raise it, or drop the option"
            )
        if algorithm.name in NO_TURNS:
            raise ConfigError(
                f"--algorithm.turn-credit turns: {algorithm.name} looks at more of an "
                "episode than its rewards, or at less; use outcome, or an algorithm "
                "such as grpo"
            )
        if algorithm.name in WHOLE_SEQUENCES:
            raise ConfigError(
                f"--algorithm.turn-credit turns: the ratio of {algorithm.name} is that "
                "of a whole sequence, in which the credit of its turns averages out; "
                "use outcome, or an algorithm such as grpo or gspo"
            )
    elif algorithm.turn_discount != 1.0:
        raise ConfigError(
            "--algorithm.turn-discount: with --algorithm.turn-credit outcome it "
            "changes nothing; drop the option, or choose turns"
        )
    if algorithm.turn_discount != 1.0 and algorithm.name in REWARD_A_TURN:
        raise ConfigError(
            f"--algorithm.turn-discount: {algorithm.name} discounts by the token; use "
            "--critic.gamma for ppo, or drop the option"
        )
    if not rollout.recompute_cache and config.exact:
        raise ConfigError(
            "--rollout.no-recompute-cache: with --exact a log-prob is that of one "
            "version's parameters, and kept keys are of another; drop one of them"
        )
    if rollout.dynamic_sampling and algorithm.correction.kind == "none":
        raise ConfigError(
            "--rollout.dynamic-sampling: groups that are left over wait for the next "
            "step, when they are of earlier parameters, and need a correction; drop "
            "--algorithm.correction.kind none"
        )
    if not rollout.partial:
        if not rollout.recompute_cache:
            raise ConfigError(
                "--rollout.no-recompute-cache: without --rollout.partial no "
                "sample goes on under other parameters; drop the option"
            )
        return
    if algorithm.name == "remax":
        raise ConfigError(
            "--rollout.partial: remax compares with a greedy answer of the same "
            "parameters; drop the option, or use another algorithm"
        )
    if config.distill.data == "demonstrations":
        raise ConfigError(
            "--rollout.partial: nothing is sampled with --distill.data demonstrations; "
            "drop the option"
        )
    if algorithm.correction.kind == "none":
        raise ConfigError(
            "--rollout.partial: samples that were begun by earlier parameters need a "
            "correction; drop --algorithm.correction.kind none"
        )


def _check_terms(config: AlgorithmConfig) -> None:
    """Refuses coefficients and clips that have no effect."""
    name = config.name
    if config.reward_weights and name != "gdpo":
        raise ConfigError(
            f"--algorithm.reward-weights: {name} looks at the whole reward; drop the "
            "option, or use --algorithm.name gdpo"
        )
    reward_weights(config)
    if name == "vespo" and config.correction != CorrectionConfig():
        raise ConfigError(
            "--algorithm.correction.*: vespo weighs by the ratio to the sampler, which "
            "is a correction already; drop the options"
        )
    if name in NO_CLIP and (config.clip_low, config.clip_high) != (None, None):
        raise ConfigError(f"--algorithm.clip-*: {name} does not clip; drop the option")
    if name == "distillation":
        if config.reference is None:
            raise ConfigError(
                "--algorithm.reference: distillation needs the directory of a teacher"
            )
        if config.kl_coefficient:
            raise ConfigError(
                "--algorithm.kl-coefficient: distillation minimises the KL to the "
                "teacher and has no other; drop the option"
            )
    elif config.reference is not None and not config.kl_coefficient:
        raise ConfigError(
            "--algorithm.reference: nothing looks at it with a kl-coefficient of 0; "
            "drop the option, or give --algorithm.kl-coefficient"
        )
    if config.entropy_coefficient and name in NO_ENTROPY:
        raise ConfigError(
            f"--algorithm.entropy-coefficient: {name} has no such term; drop the option"
        )
    if name in KL_IN_REWARD:
        if config.kl_weights is not None:
            raise ConfigError(
                f"--algorithm.kl-weights: in {name} the KL is part of the reward, "
                "which has no gradient; drop the option"
            )
    elif config.kl_estimator == "k1" and config.kl_weights is None:
        raise ConfigError(
            f"--algorithm.kl-estimator: in {name} the KL is part of the loss, where "
            "k1 has an expected gradient of zero; choose k2, k3 or k3_plus, or give "
            "--algorithm.kl-weights"
        )


def _check_critic(config: AlgorithmConfig, critic: CriticConfig) -> None:
    """Refuses options of a critic that does not exist."""
    if config.name != "ppo" and critic != NO_CRITIC:
        raise ConfigError(f"--critic.*: {config.name} has no critic; drop the options")
    if critic.backbone != "shared" and critic.coefficient != NO_CRITIC.coefficient:
        raise ConfigError(
            "--critic.coefficient: weighs the loss of a critic on the policy's "
            "backbone; drop the option, or use --critic.backbone shared"
        )
    if critic.backbone == "shared":
        for option, given in (
            ("model", critic.model is not None),
            ("warmup-steps", critic.warmup_steps > 0),
            ("lora.*", critic.lora != NO_CRITIC.lora),
        ):
            if given:
                raise ConfigError(
                    f"--critic.{option}: a shared backbone has none of its own; drop "
                    "the option, or use --critic.backbone separate"
                )


def _check_distillation(config: AlgorithmConfig, distill: DistillConfig) -> None:
    """Refuses options of distillation that have no effect or contradict others."""
    if config.name != "distillation":
        if distill != NO_TEACHER:
            raise ConfigError(
                f"--distill.*: {config.name} has no teacher; drop the options, or use "
                "--algorithm.name distillation"
            )
        return
    for name, divergence in SERVES.items():
        if getattr(distill, name) is not None and distill.divergence != divergence:
            raise ConfigError(
                f"--distill.{name.replace('_', '-')}: {distill.divergence} has no such "
                "hyperparameter; drop the option"
            )
    if not distill.temperature > 0:
        raise ConfigError(
            f"--distill.temperature: must be greater than 0; got {distill.temperature}"
        )
    if distill.divergence == "sampled":
        _check_sampled(distill)
        return
    plain = AlgorithmConfig(name=config.name, reference=config.reference)
    for name in ("clip_low", "clip_high", "correction", "kl_estimator", "kl_weights"):
        if getattr(config, name) != getattr(plain, name):
            raise ConfigError(
                f"--algorithm.{name.replace('_', '-')}: {distill.divergence} compares "
                "whole distributions and has no such term; drop the option"
            )


def _check_sampled(distill: DistillConfig) -> None:
    if distill.data != "samples":
        raise ConfigError(
            "--distill.data: the advantage of a sampled token needs the student's own "
            "samples; choose another --distill.divergence"
        )
    if distill.temperature != 1.0:
        raise ConfigError(
            "--distill.temperature: sampled compares at --rollout.temperature; drop "
            "the option"
        )
