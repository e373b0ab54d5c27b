"""The configuration of a run: frozen dataclasses, one field one fact.

`launch` makes command-line options of them; recipes are functions that return one.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_post.config.distill import DistillConfig
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.preference import PairsConfig, PreferenceLossConfig
from jaxrl_post.config.reward_model import RewardModelConfig

__all__ = [
    "DEFAULT_ENV",
    "AlgorithmConfig",
    "AlgorithmName",
    "CheckpointConfig",
    "ConfigError",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "OfflineConfig",
    "OnOverlap",
    "PreferenceConfig",
    "RLConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "TrackerName",
    "UpdateConfig",
    "WarmStartConfig",
    "differences",
]


AlgorithmName = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "gmpo", "sapo", "max_rl",
    "gdpo", "opo", "remax", "clipped_rloo", "luspo", "lite_ppo", "vespo", "ppo",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "distillation",
]  # fmt: skip


CorrectionName = Literal[
    "none", "truncated_tokens", "truncated_sequences", "icepop", "icepop_sequences",
    "masked_sequences",
]  # fmt: skip

TrackerName = Literal["tensorboard", "wandb", "trackio"]


OnOverlap = Literal["fail", "drop", "allow"]

# The environment of a program that names neither environment nor file.
DEFAULT_ENV = "arithmetic"


class ConfigError(ValueError):
    """A configuration that contradicts itself or what is there."""


@dataclass(frozen=True)
class DataConfig:
    """Files of environments that read some (jsonl, gsm8k), or of launch.sft's chats.

    Attributes:
        path: .jsonl or .parquet file to learn from; hf://datasets/ORG/NAME/FILE for one
            on the hub, ORG/NAME@REVISION for a revision of it.
        eval_path: likewise, of what is held out; default: a tenth of the prompts of
            `path`.
        on_bad_row: stop at a malformed row, or skip, count and report it.
        on_overlap: what to do about training tasks whose prompt is held out too, of any
            environment: stop, drop them from training, or allow them.
    """

    path: str | None = None
    eval_path: str | None = None
    on_bad_row: Literal["fail", "skip"] = "fail"
    on_overlap: OnOverlap = "fail"


@dataclass(frozen=True)
class RolloutConfig:
    """How samples are drawn and judged.

    Attributes:
        prompts_per_step: groups in a training batch.
        samples_per_prompt: samples in a group.
        max_prompt_tokens: longest prompt, 0 for the environment's longest; tasks with a
            longer one are left out, and counted.
        max_tokens: most tokens of a completion, the stop token included.
        max_turns: of the policy in an episode; an environment that would go on is
            ended there. More than one needs `max_prompt_tokens`, which bounds the
            conversation before the last turn.
        partial: groups that may be unfinished when a step is taken. Then so many more
            prompts are under way than a step needs, it takes the first groups that
            finish, and the others go on under the next parameters. 0 waits for all.
        temperature: > 0; part of the policy; generation_config.json is not read.
        top_k: as SamplingParams.
        top_p: as SamplingParams.
        min_p: as SamplingParams.
        stop_strings: as SamplingParams.
        num_slots: samples that decode at once; 0 for a whole step's, with those of
            `partial`.
        steps_per_call: decoding steps between two looks of the host; 0 chooses.
        dynamic_sampling: draw prompts until `prompts_per_step` groups have rewards that
            differ (DAPO); groups beyond that wait for the next step.
        truncated: what an answer is worth that was cut at `max_tokens`. zero: nothing,
            whatever stands in it; reward: what the environment says; mask: it is not
            trained on, but is compared with in its group (DAPO's overlong filter).
        overlong_buffer: tokens before `max_tokens` over which a completion's reward
            falls by up to `overlong_penalty` (DAPO); 0 for none.
        overlong_penalty: what a completion of `max_tokens` loses.
        max_draws: with dynamic sampling, prompts drawn for a step at most, as a
            multiple of `prompts_per_step`; after that the step makes do.
        reward_workers: processes that judge.
        reward_deadline_s: seconds for one judgement.
        reward_grace_s: with `partial`, seconds for which decoding waits for the
            judgements of the turns that have just ended. While judges keep within it, a
            run can be repeated to the last bit; a slower one is not waited for again.
        max_failed_share: stop the run if more of a step's rollouts fail.
        deadline_s: seconds for all rollouts of a step.
    """

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    max_prompt_tokens: int = 0
    max_tokens: int = 256
    max_turns: int = 1
    partial: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    num_slots: int = 0
    steps_per_call: int = 0
    dynamic_sampling: bool = False
    truncated: Literal["reward", "zero", "mask"] = "zero"
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    max_draws: int = 4
    reward_workers: int = 1
    reward_deadline_s: float = 10.0
    reward_grace_s: float = 0.25
    max_failed_share: float = 0.25
    deadline_s: float = 3600.0


@dataclass(frozen=True)
class CorrectionConfig:
    """How the loss allows for what sampler and trainer disagree on.

    Attributes:
        kind: of `jaxrl_post.algorithms.corrections`.
        cap: of the weights, for all kinds but icepop; None keeps the default.
        low: lower bound of icepop and masked_sequences; None keeps the default.
        high: upper bound of the same.
    """

    kind: CorrectionName = "truncated_tokens"
    cap: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class AlgorithmConfig:
    """Which algorithm, and what departs from its paper's defaults (None keeps them).

    Attributes:
        name: of `jaxrl_post.algorithms`.
        clip_low: lower clip; cispo's lower ratio bound.
        clip_high: upper clip; cispo's upper ratio bound.
        kl_coefficient: weight of the KL to the reference policy; 0 needs no reference.
        kl_estimator: of that term.
        kl_coefficient: weight of the KL to the reference policy: in the reward of ppo
            and reinforce_plus_plus, in the loss of the others; 0 needs no reference.
        kl_estimator: of that term; k1 only inside the reward. None for k1 there and k3
            in a loss.
        reference: Hugging Face directory of the reference policy, or ORG/NAME on the
            hub (ORG/NAME@REVISION for a revision); it is the teacher of distillation;
            None for the model as it began.
        entropy_coefficient: weight of the entropy that the loss rewards.
        reward_weights: of gdpo, NAME=WEIGHT of the parts of the reward, such as own=1
            length=0.5; parts that are not named do not count. None for all, with 1.
        turn_credit: outcome: all turns of an episode are credited with the sum of its
            rewards; turns: each turn with the rewards from it on. In ppo and
            reinforce_plus_plus, which discount by the token, a turn's reward then
            stands at the turn's last token.
        turn_discount: a turn, of the rewards from a turn on; 0 credits a turn with its
            own reward alone.
        correction: of what the sampler's log-probs differ by.
    """

    name: AlgorithmName = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "k3_plus"] | None = None
    reference: str | None = None
    entropy_coefficient: float = 0.0
    reward_weights: tuple[str, ...] = ()
    turn_credit: Literal["outcome", "turns"] = "outcome"
    turn_discount: float = 1.0
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass(frozen=True)
class CriticConfig:
    """The critic of ppo; other algorithms have none.

    Attributes:
        backbone: separate: a model of its own; shared: a value head on the policy.
        model: Hugging Face directory, or ORG/NAME on the hub, in which a separate
            critic begins, a reward model or a language model; None for the policy's
            own weights.
        gamma: discount a token.
        gae_lambda: of the policy's advantages.
        value_lambda: of the critic's targets; 1 makes them the returns.
        clip: how far a value may move in the updates of a batch; 0 for no clip.
        coefficient: weight of the critic's loss beside the policy's in a shared model.
        warmup_steps: steps at the beginning in which a separate critic learns alone.
        bootstrap_truncated: an answer that was cut at the most tokens earns what the
            critic expects after it, beside its reward; without, the cut is its end.
        optimizer: AdamW of a separate critic.
        lora: an adapter to train, with the value head, in place of a separate critic's
            whole model.
    """

    backbone: Literal["separate", "shared"] = "separate"
    model: str | None = None
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_lambda: float = 1.0
    clip: float = 0.2
    coefficient: float = 0.1
    warmup_steps: int = 0
    bootstrap_truncated: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)


@dataclass(frozen=True)
class UpdateConfig:
    """How a batch becomes optimizer steps.

    Attributes:
        minibatches: optimizer steps per pass over the batch.
        epochs: passes over the batch.
        row_tokens: length of a packed row; 0 for longest prompt plus completion.
        microbatch_tokens: tokens of one forward and backward pass, padding included.
        remat: what the backward pass keeps of a layer; "full" saves the most memory.
        scan_layers: compile layers that repeat once, as a loop: deep models compile in
            a fraction of the time and memory, and a step copies its weights once.
        router_balance: weight of the load-balancing loss of a mixture of experts.
        router_z: weight of its routers' z-loss.
    """

    minibatches: int = 1
    epochs: int = 1
    row_tokens: int = 0
    microbatch_tokens: int = 4096
    remat: Literal["none", "dots", "full"] = "none"
    scan_layers: bool = False
    router_balance: float = 0.0
    router_z: float = 0.0


@dataclass(frozen=True)
class EvalConfig:
    """What is measured on held-out tasks, demonstrations or pairs.

    Sampling programs answer each task once, greedily.

    Attributes:
        every: steps between evaluations; 0 for the first and last step alone.
        num_tasks: held-out tasks, demonstrations or pairs.
        solved_reward: an answer with at least this reward solves its task; accuracy is
            the share of those, eval/reward the mean reward.
    """

    every: int = 25
    num_tasks: int = 128
    solved_reward: float = 1.0

    def due(self, step: int, steps: int) -> bool:
        """Whether a step of a run of so many steps ends with an evaluation."""
        return step == steps or (self.every > 0 and step % self.every == 0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save.

    Attributes:
        every: steps between checkpoints; the last step is always saved.
        keep: checkpoints kept.
    """

    every: int = 25
    keep: int = 2


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps that a preset takes before reinforcement learning.

    A randomly initialised model writes noise, which no reward can tell apart; a few
    supervised steps teach it what an answer looks like. A model that was loaded from a
    directory gets none.

    Attributes:
        steps: optimizer steps; 0 for none.
        examples_per_step: demonstrations of a step.
        learning_rate: peak.
    """

    steps: int = 0
    examples_per_step: int = 64
    learning_rate: float = 2e-3


@dataclass(frozen=True)
class RunConfig:
    """What every training program has.

    Attributes:
        run_dir: where everything goes; None for a directory under runs/ that is named
            after algorithm, environment and model.
        resume: go on from the newest checkpoint in `run_dir`, if there is one.
        seed: of initial weights, data order and sampling noise.
        mesh: such as "dp4,tp8"; default: all devices on dp.
        model: a Hugging Face directory, ORG/NAME on the hub, or a preset with random
            weights: demo, tiny, small, or a published size such as qwen3-0.6b
            (jaxrl_post.pretrained.presets).
        revision: branch, tag or commit of a model on the hub.
        dtype: of the parameters; None for the checkpoint's own, float32 for a preset.
        steps: of the run; each is a batch, sampled or read.
        update: how a batch becomes optimizer steps.
        optimizer: AdamW.
        eval: on what is held out.
        checkpoint: when to save.
        warm_start: supervised steps of a preset.
        lora: an adapter to train in place of the model.
        log: who gets the metrics, beside metrics.jsonl: tensorboard, wandb, trackio.
        log_project: of wandb and trackio; None for their default.
    """

    run_dir: str | None = None
    resume: bool = True
    seed: int = 0
    mesh: str = ""
    model: str = "demo"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    steps: int = 200
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    log: tuple[TrackerName, ...] = ("tensorboard",)
    log_project: str | None = None


@dataclass(frozen=True)
class OfflineConfig(RunConfig):
    """What programs have that learn from a data set.

    Attributes:
        examples_per_step: demonstrations, pairs or judged answers of a step.
        max_tokens: longest prompt plus answer.
        log_every: steps between rows of metrics.
    """

    examples_per_step: int = 64
    max_tokens: int = 128
    log_every: int = 10
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5, warmup_steps=20)
    )


@dataclass(frozen=True)
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning on chats and texts, or an environment's demonstrations.

    Attributes:
        env: arithmetic, gsm8k, jsonl, reasoning-gym:<task>, or <module>:<factory>, with
            options as in arithmetic?level=2. None for the rows of `data.path`, which
            have messages, prompt and completion, or text; arithmetic without a file.
        data: files.
    """

    env: str | None = None
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class PreferenceConfig(OfflineConfig):
    """Optimisation on preference pairs or judged answers.

    Attributes:
        data: of the pairs or answers.
        loss: on a pair or an answer.
    """

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-6, warmup_steps=20)
    )
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)


@dataclass(frozen=True)
class RLConfig(RunConfig):
    """Policy optimisation on samples of its own.

    Attributes:
        env: arithmetic, gsm8k, jsonl, reasoning-gym:<task>, or <module>:<factory>, with
            options as in arithmetic?level=2 or jsonl?grader=math.
        data: files.
        log_samples: training completions logged at each evaluation.
        log_eval_samples: held-out completions logged at each evaluation.
        algorithm: what is optimised.
        critic: of ppo.
        distill: what distillation takes from the teacher.
        reward: a reward model that judges beside the environment.
        rollout: how samples are drawn and judged.
    """

    env: str = "arithmetic"
    data: DataConfig = field(default_factory=DataConfig)
    log_samples: int = 8
    log_eval_samples: int = 8
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-6)
    )
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    reward: RewardModelConfig = field(default_factory=RewardModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)


# What may differ between a run and its continuation. Where a schedule of the learning
# rate ends it keeps (config/horizon.py), unless it is asked to end elsewhere.
FREE_TO_CHANGE = (
    "run_dir", "resume", "mesh", "steps", "log_samples", "log_eval_samples",
    "log_every", "log", "log_project", "eval", "checkpoint",
    "update.microbatch_tokens", "update.remat", "update.scan_layers",
    "rollout.reward_workers", "rollout.reward_deadline_s", "rollout.reward_grace_s",
    "rollout.deadline_s", "rollout.max_failed_share", "optimizer.schedule_steps",
    "critic.optimizer.schedule_steps",
)  # fmt: skip


def differences(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What would make a continuation another run than the one that was saved.

    Args:
        saved: the configuration of the run, as config.json holds it.
        config: of the continuation.

    Returns:
        A line an option; none where the run can go on.

    >>> saved = dataclasses.asdict(SFTConfig(seed=3, log_every=7))
    >>> differences(saved, SFTConfig())
    ['seed: 3 then, 0 now']
    """
    before, now = _flat(saved), _flat(dataclasses.asdict(config))
    return [
        f"{name}: {before.get(name)!r} then, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
        and not any(
            name == each or name.startswith(f"{each}.") for each in FREE_TO_CHANGE
        )
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(item) if isinstance(item, tuple) else item
    return flat
