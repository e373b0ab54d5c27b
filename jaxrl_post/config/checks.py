"""Checks options against each other, before jax is imported.

`check_options` runs all checks of a training program. A check that needs the model or
the devices runs where these are opened.
"""

import dataclasses
import difflib
import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from jaxrl_post.config.algorithm import (
    ALGORITHMS,
    AlgorithmConfig,
    CorrectionConfig,
    DistillConfig,
)
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.data import check_rows, check_template, columns_of
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.fields import check_numbers
from jaxrl_post.config.horizon import check_schedules
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import (
    PREFERENCES,
    OfflineConfig,
    PreferenceConfig,
    PreferenceLossConfig,
    RewardConfig,
    SFTConfig,
)
from jaxrl_post.config.paths import check_paths, check_repository, naming
from jaxrl_post.config.reward_model import PrmConfig, RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import (
    FleetConfig,
    RolloutConfig,
    check_address,
    check_judges,
)
from jaxrl_post.config.run import (
    CheckpointConfig,
    RunConfig,
    WatchConfig,
    address_of,
    loaded_callbacks,
    profiled_steps,
)
from jaxrl_post.extras import install
from jaxrl_post.mesh_spec import MeshError, read_mesh
from jaxrl_post.watch.bounds import RuleError
from jaxrl_post.watch.rule import read_rules

__all__ = [
    "check_algorithm",
    "check_correction",
    "check_name",
    "check_options",
    "known",
    "read_grader",
    "read_webhook",
    "reward_weights",
    "with_steps",
]

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
    if isinstance(config, RLConfig | SFTConfig):
        check_rows(config.data, own=config.env is not None)
    if isinstance(config, PreferenceConfig | RewardConfig):
        columns_of(config.data.columns)
    check_schedules(config)
    if config.vision == "trained" and config.lora.rank:
        raise ConfigError(
            "--vision: trained changes the whole vision tower, and --lora.rank trains "
            "adapters of the text model alone; take --vision frozen, or drop "
            "--lora.rank"
        )
    _check_best(config)
    _check_mesh(config.mesh, "--")
    for name in config.log:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log {name}: there is no module {name!r}: {install(name)}"
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
    check_repository(config.push_to_hub, public=config.push_public)
    if config.epochs is None:
        profiled_steps(config.profile, config.steps)
    loaded_callbacks(config.callbacks)
    _check_watch(config.watch)
    if isinstance(config, RLConfig):
        _check_rl(config)
    if isinstance(config, OfflineConfig):
        _check_offline(config)


def with_steps[Config: RunConfig](config: Config, size: int, per_step: int) -> Config:
    """Sets `steps` to what `epochs` needs, and checks the options that depend on it.

    Args:
        config: of a run; without `epochs` it is returned unchanged.
        size: number of training tasks or examples, at least 1.
        per_step: how many of them a step takes.

    Raises:
        ConfigError: names the option.

    >>> with_steps(RunConfig(epochs=1.5), 100, 32).steps
    5
    """
    if config.epochs is None:
        return config
    steps = max(1, math.ceil(config.epochs * size / per_step))
    config = dataclasses.replace(config, steps=steps)
    check_options(dataclasses.replace(config, epochs=None))
    return config


def check_algorithm(
    config: AlgorithmConfig,
    critic: CriticConfig,
    distill: DistillConfig,
    prm: PrmConfig,
) -> None:
    """Refuses options of an algorithm that have no effect or contradict others.

    What depends on the algorithm itself is checked where it is made
    (`learner.algorithm`).

    Raises:
        ConfigError: names the option.
    """
    check_name(config.name, "--algorithm.name", "algorithm", ALGORITHMS)
    reward_weights(config)
    _check_critic(critic)
    _check_new("prm", prm.lora)
    _check_distillation(config, distill)
    check_correction(config.correction)


def reward_weights(config: AlgorithmConfig) -> list[tuple[str, float]]:
    """Parses --algorithm.reward-weights: names and weights of the reward's parts.

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


def _check_reference(
    config: AlgorithmConfig | PreferenceLossConfig, option: str, run: RunConfig
) -> None:
    """Refuses a reference that cannot follow, and options of one without effect.

    Whether the run has a reference is checked where its algorithm or loss is made.
    """
    steps, mixup = config.reference_sync_steps, config.reference_mixup
    if not steps:
        if mixup != 1.0:
            raise ConfigError(
                f"{option}-mixup: without {option}-sync-steps the reference stays as "
                f"it is; got {mixup:g}; drop the option, or give the other"
            )
        return
    if run.epochs is None and steps >= run.steps:
        raise ConfigError(
            f"{option}-sync-steps: must be less than --steps, {run.steps}, or no step "
            f"has a new reference; got {steps}"
        )
    if run.lora.rank and mixup != 1.0:
        raise ConfigError(
            f"{option}-mixup: must be 1 with --lora.rank, a copy of the adapter: the "
            "product of two mixed matrices is no mixture of their products; got "
            f"{mixup:g}; drop one of the two"
        )
    if run.lora.rank and config.reference is not None:
        raise ConfigError(
            f"{option}-sync-steps: {config.reference} cannot follow an adapter over "
            f"another base; drop the option, or drop {option}, so that the reference "
            "is the policy before its first step"
        )


def _check_best(config: RunConfig) -> None:
    """Refuses options of the best model that name no metric, or have no effect."""
    options, metric = config.checkpoint, config.checkpoint.keep_best
    if metric is None:
        for name in ("best_is", "patience", "min_delta"):
            if getattr(options, name) != getattr(CheckpointConfig, name):
                raise ConfigError(
                    f"--checkpoint.{name.replace('_', '-')}: needs "
                    "--checkpoint.keep-best, the metric that is compared; give it, or "
                    "drop the option"
                )
        return
    if not re.fullmatch(r"eval/\S+", metric):
        last = re.sub(r"^eval_|.*/", "", metric) or "accuracy"
        raise ConfigError(
            "--checkpoint.keep-best: must be a metric of the evaluations, such as "
            f"eval/{last}; got {metric!r}"
        )
    if options.min_delta and options.patience is None:
        raise ConfigError(
            "--checkpoint.min-delta: changes nothing without --checkpoint.patience; "
            "give that, or drop the option"
        )
    if options.patience is not None and not config.eval.every:
        raise ConfigError(
            "--checkpoint.patience: with --eval.every 0 only the first and the last "
            "step are evaluated; give the steps between evaluations, or drop the option"
        )


def read_grader(text: str) -> tuple[str, str]:
    """Splits NAME=ENVIRONMENT of --eval.graders.

    Raises:
        ConfigError: it is written otherwise.

    >>> read_grader("strict=jsonl?grader=exact")
    ('strict', 'jsonl?grader=exact')
    """
    found = re.fullmatch(r"([A-Za-z][\w-]*)=(.+)", text, re.DOTALL)
    if found is None:
        raise ConfigError(
            "--eval.graders: must be NAME=ENVIRONMENT, such as "
            f"strict=jsonl?grader=exact; got {text!r}"
        )
    return found[1], found[2]


def read_webhook(file: str) -> str:
    """Reads the URL of a webhook from its file.

    Raises:
        ConfigError: the file cannot be read, or its first line is no http or https URL.
            The URL is a secret and is not told.
    """
    try:
        url = Path(file).read_text(encoding="utf-8").strip().splitlines()[0].strip()
        parts = urlsplit(url)
        # `port` raises for a port that is no number.
        fits = url.isascii() and url.isprintable() and " " not in url
        fits = fits and (parts.port is None or parts.port > 0)
    except (OSError, ValueError, IndexError) as error:
        told = str(error) if isinstance(error, OSError) else "it holds none"
        raise ConfigError(
            f"--watch.webhook: cannot read a URL from the file {file}: {told}"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not fits:
        raise ConfigError(
            f"--watch.webhook: the first line of {file} must be a URL that begins with "
            "https:// or http://"
        )
    return url


def _check_watch(watch: WatchConfig) -> None:
    try:
        read_rules(watch.rules, watch.off)
    except RuleError as error:
        option = "--watch.off" if watch.rules is None else "--watch.rules"
        raise ConfigError(f"{option}: {error}") from error
    if watch.webhook is not None:
        read_webhook(watch.webhook)
    if watch.listen is not None:
        address_of(watch.listen, "--watch.listen")
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError(
                "--watch.listen: there is no module 'prometheus_client': "
                f"{install('serve')}"
            )


def _check_offline(config: OfflineConfig) -> None:
    if config.eval.graders:
        raise ConfigError(
            "--eval.graders: grade the answers that a run samples, and this program "
            "samples none; drop the option, or grade the model with launch.evaluate"
        )
    if isinstance(config, PreferenceConfig):
        check_name(config.loss.name, "--loss.name", "preference loss", PREFERENCES)
        _check_reference(config.loss, "--loss.reference", config)
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
    if config.kind == "process" and config.data.format not in ("auto", "plain"):
        raise ConfigError(
            f"--data.format: {config.data.format} has no labelled steps, which --kind "
            "process learns from; drop the option"
        )


def _check_vision(config: RLConfig) -> None:
    """Refuses what cannot be combined with pictures yet."""
    rollout = config.rollout
    for option, given in (
        ("--exact", config.exact),
        ("--samplers", config.samplers),
        ("--rollout.mesh", rollout.mesh),
        ("--rollout.dtype", rollout.dtype),
        ("--rollout.weights", rollout.weights),
        ("--rollout.draft", rollout.draft),
        ("--rollout.mtp", rollout.mtp),
    ):
        if given:
            raise ConfigError(
                f"{option}: cannot be combined with --vision {config.vision} yet; the "
                "sampler sees pictures with the trainer's own arrays, without exact "
                "mode and without a draft model; drop one of the two options"
            )


def _check_rl(config: RLConfig) -> None:
    _check_log_rollouts(config)
    if config.exact:
        _check_exact(config)
    check_algorithm(config.algorithm, config.critic, config.distill, config.prm)
    _check_reference(config.algorithm, "--algorithm.reference", config)
    _check_mesh(config.rollout.mesh, "--rollout.", trains=False)
    _check_mesh(config.reward.mesh, "--reward.")
    _check_idle(config)
    if config.vision != "off":
        _check_vision(config)
    check_judges(config.rollout.judges, config.rollout.reward_cpus, "rollout.")
    if config.mismatch.warn > config.mismatch.stop:
        raise ConfigError(
            f"--mismatch.warn: must be at most --mismatch.stop, "
            f"{config.mismatch.stop:g}; got {config.mismatch.warn:g}"
        )
    names = [read_grader(each)[0] for each in config.eval.graders]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--eval.graders: the name {doubled[0]} is given twice")
    _check_rollout(config)
    _check_turns(config)
    _check_ahead(config)
    if config.reward.model is None and config.reward != RewardModelConfig():
        raise ConfigError(
            "--reward.*: there is no reward model; give --reward.model, or drop the "
            "options"
        )
    if config.epochs is None and 0 < config.critic.warmup_steps >= config.steps:
        raise ConfigError(
            f"--critic.warmup-steps: must be less than --steps, {config.steps}, or the "
            f"policy never learns; got {config.critic.warmup_steps}"
        )


def _check_log_rollouts(config: RLConfig) -> None:
    if config.log_rollouts is None:
        return
    if config.distill.data == "demonstrations":
        raise ConfigError(
            "--log-rollouts: nothing is sampled with --distill.data demonstrations; "
            "drop the option"
        )
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"--log-rollouts parquet: there is no module 'pyarrow': "
            f"{install('parquet')}"
        )


def _check_mesh(text: str, section: str, *, trains: bool = True) -> None:
    try:
        read_mesh(text, trains=trains)
    except MeshError as error:
        raise MeshError(f"{section}{error}") from error


def _check_idle(config: RLConfig) -> None:
    """Refuses options that do nothing without another one."""
    algorithm, rollout, defaults = config.algorithm, config.rollout, RolloutConfig()
    needs = {
        "overlong_penalty": (rollout.overlong_buffer, "--rollout.overlong-buffer"),
        **dict.fromkeys(
            ("max_draws", "group_reward_low", "group_reward_high"),
            (rollout.dynamic_sampling, "--rollout.dynamic-sampling"),
        ),
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


def _check_exact(config: RLConfig) -> None:
    """Refuses options that make sampler and trainer compute differently."""
    if config.rollout.dtype not in (None, config.dtype):
        raise ConfigError(
            "--rollout.dtype: with --exact the sampler computes as the trainer does; "
            f"got {config.rollout.dtype} with --dtype {config.dtype}; drop the option"
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
    if config.update.precision is not None:
        raise ConfigError(
            "--update.precision: with --exact sums have one order, which products in "
            f"{config.update.precision} do not have; drop one of the two"
        )
    if config.lora.dropout:
        raise ConfigError(
            "--lora.dropout: with --exact the log-probs that are trained on equal the "
            f"sampler's, which has no dropout; got {config.lora.dropout:g}; drop one "
            "of the two"
        )


def _check_rollout(config: RLConfig) -> None:
    rollout = config.rollout
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
    if rollout.mtp and not rollout.guesses:
        raise ConfigError(
            "--rollout.mtp: guesses --rollout.guesses tokens in a pass, which are 0; "
            "give a number, such as 2, or drop the option"
        )
    if rollout.mtp and config.remote_samplers:
        raise ConfigError(
            "--rollout.mtp: samplers of other processes (--samplers "
            f"{config.samplers}) get the policy's parameters and not the files of its "
            "layer; drop the option, or give a number of --samplers"
        )
    if rollout.mtp and rollout.draft is not None:
        raise ConfigError(
            f"--rollout.mtp: --rollout.draft {rollout.draft} guesses too; drop one of "
            "the two"
        )
    if config.critic.bootstrap_truncated and rollout.truncated == "mask":
        raise ConfigError(
            "--critic.bootstrap-truncated: --rollout.truncated mask leaves the answers "
            "out that were cut; drop one of the two"
        )
    low, high = rollout.group_reward_low, rollout.group_reward_high
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            "--rollout.group-reward-low: must be below --rollout.group-reward-high, "
            f"{high:g}, or no group is kept; got {low:g}"
        )
    if rollout.dynamic_sampling and rollout.samples_per_prompt < 2:
        raise ConfigError(
            "--rollout.dynamic-sampling: keeps the prompts whose samples differ in "
            "reward, and a single sample differs from none; drop the option, or raise "
            "--rollout.samples-per-prompt"
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
    elif algorithm.turn_discount != 1.0:
        raise ConfigError(
            "--algorithm.turn-discount: with --algorithm.turn-credit outcome it "
            "changes nothing; drop the option, or choose turns"
        )
    if rollout.router_replay and config.exact:
        raise ConfigError(
            "--rollout.router-replay: with --exact the trainer chooses the sampler's "
            "experts by itself; drop one of them"
        )
    if not rollout.recompute_cache and config.exact:
        raise ConfigError(
            "--rollout.no-recompute-cache: with --exact every log-prob comes from one "
            "version's parameters, and kept keys come from another; drop one of them"
        )
    if rollout.dynamic_sampling and algorithm.correction.kind == "none":
        raise ConfigError(
            "--rollout.dynamic-sampling: spare groups wait for the next step, are "
            "off-policy by then, and need a correction; drop "
            "--algorithm.correction.kind none"
        )
    _check_staleness(rollout)
    if not rollout.partial:
        if not rollout.recompute_cache:
            raise ConfigError(
                "--rollout.no-recompute-cache: without --rollout.partial no sample "
                "outlives its parameters; drop the option"
            )
        return
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


def _check_staleness(rollout: RolloutConfig) -> None:
    """Refuses a bound that has no effect, or that cannot hold."""
    if rollout.staleness is None:
        return
    if not rollout.partial:
        raise ConfigError(
            "--rollout.staleness: without --rollout.partial a step trains on the "
            f"groups that are begun for it, by parameters of --rollout.ahead "
            f"{rollout.ahead} steps before; drop the option"
        )
    least = rollout.ahead + -(-rollout.partial // rollout.prompts_per_step)
    if rollout.staleness < least:
        raise ConfigError(
            f"--rollout.staleness: must be at least {least}, which is --rollout.ahead "
            f"{rollout.ahead} and the steps that take --rollout.partial "
            f"{rollout.partial} groups, {rollout.prompts_per_step} each; got "
            f"{rollout.staleness}"
        )


def _check_ahead(config: RLConfig) -> None:
    """Refuses what does not go with samplers of their own, or with `rollout.ahead`."""
    ahead, given = config.rollout.ahead, []
    if ahead:
        given.append(f"--rollout.ahead {ahead}")
    if config.remote_samplers:
        check_address(config.fleet)
        if config.rollout.mesh:
            raise ConfigError(
                f"--rollout.mesh: samplers in other processes each have the --mesh of "
                f"their launch.serve; got {config.rollout.mesh!r}; drop the option"
            )
        if config.critic.backbone == "shared":
            raise ConfigError(
                "--critic.backbone shared: samplers in other processes get a policy "
                f"without a value head; got --samplers {config.samplers}; take a "
                "separate critic"
            )
    elif config.fleet != FleetConfig():
        raise ConfigError(
            "--fleet.*: is for samplers in other processes; give --samplers any:N, or "
            "drop the option"
        )
    if config.samplers:
        given.append(f"--samplers {config.samplers}")
    if not given:
        return
    if config.distill.data == "demonstrations":
        raise ConfigError(
            f"{given[0]}: nothing is sampled with --distill.data demonstrations; drop "
            "the option"
        )
    if ahead and config.algorithm.correction.kind == "none":
        raise ConfigError(
            f"{given[0]}: samples of earlier parameters need a correction; drop "
            "--algorithm.correction.kind none"
        )
    if config.samplers and config.reward.model is not None and not config.reward.mesh:
        raise ConfigError(
            f"--reward.model: with {given[-1]} answers are judged while the trainer's "
            "devices train; give the reward model devices of its own, --reward.mesh dp1"
        )


def _check_new(section: str, lora: AdapterConfig) -> None:
    """Refuses the adapter to continue of a model that is trained next to the policy."""
    if lora.path is not None:
        raise ConfigError(
            f"--{section}.lora.path: its adapter is always new; give the adapter as "
            f"--{section}.model, which merges it, and --{section}.lora.rank"
        )


def _check_critic(critic: CriticConfig) -> None:
    """Refuses options of a critic that have no effect."""
    _check_new("critic", critic.lora)
    if critic.backbone != "shared" and critic.coefficient != CriticConfig.coefficient:
        raise ConfigError(
            "--critic.coefficient: weighs the loss of a critic on the policy's "
            "backbone; drop the option, or use --critic.backbone shared"
        )
    if critic.backbone == "shared":
        for option, given in (
            ("model", critic.model is not None),
            ("warmup-steps", critic.warmup_steps > 0),
            ("lora.*", critic.lora != AdapterConfig()),
        ):
            if given:
                raise ConfigError(
                    f"--critic.{option}: a shared backbone has none of its own; drop "
                    "the option, or use --critic.backbone separate"
                )


def _check_distillation(config: AlgorithmConfig, distill: DistillConfig) -> None:
    """Refuses options of distillation that have no effect or contradict others."""
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
    for name in (
        "clip_low", "clip_high", "correction", "kl_coefficient", "kl_estimator",
        "kl_weights", "entropy_coefficient",
    ):  # fmt: skip
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


def check_name(spec: str, option: str, kind: str, names: Sequence[str]) -> None:
    """Refuses a name that is neither the package's nor a module's.

    Args:
        spec: the name, perhaps with parameters behind a question mark.
        option: that gives it, for error messages.
        kind: what it names, for error messages.
        names: the names of the package.

    Raises:
        ConfigError: names the closest known name.
    """
    name = spec.partition("?")[0]
    if ":" not in name and name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"{option}: no {kind} {name!r}; there are {known(names)}{hint}"
        )


def known(names: Sequence[str]) -> str:
    """Lists the package's names and the form of a user's own, for error messages."""
    return f"{', '.join(names)}, <module>:<function>"
