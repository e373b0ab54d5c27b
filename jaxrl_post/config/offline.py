"""The options of training on a data set: fine-tuning, preferences, reward models."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxrl_post.config.data import DataConfig, OnUnwritten
from jaxrl_post.config.fields import (
    ANY,
    COUNT,
    FREE,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
)
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import RunConfig
from jaxrl_post.tables import Format

__all__ = [
    "PREFERENCES",
    "OfflineConfig",
    "PairsConfig",
    "PreferenceConfig",
    "PreferenceLossConfig",
    "RewardConfig",
    "SFTConfig",
]

# AOT is left out: it compares the sorted margins of a whole batch, and a step may
# see its batch in several microbatches.
PREFERENCES = (
    "dpo", "robust_dpo", "ln_dpo", "hinge", "ipo", "alpha_divergence_dpo",
    "jensen_shannon_dpo", "wpo", "reference_free_dpo", "simpo", "cpo", "orpo", "kto",
    "apo_zero", "apo_down", "bco_pair", "nca", "sppo", "discopop", "exo",
)  # fmt: skip


@dataclass(frozen=True)
class PairsConfig:
    """Preference pairs, judged answers, or solutions in judged steps, from a file.

    Attributes:
        path: .jsonl or .parquet with prompt, chosen and rejected, as texts or as
            messages; GSM8K's example solutions of several models; for kto, prompt,
            completion and label; for process reward models, prompt, completions (a list
            of steps) and labels. hf://datasets/ORG/NAME/FILE is one on the hub.
        on_bad_row: what to do about a malformed row: fail, stop with an error; skip,
            leave it out, and report how many there were.
        eval_share: share of the prompts that is held out for evaluation; one pair,
            answer or solution of each of these is evaluated.
        on_unwritten: what to do about prompts and answers if the chat template leaves
            out a part of them, such as a system prompt: fail, stop with an error that
            counts them; drop, leave them out; allow, take what the template writes.
        columns: fields that the file calls otherwise, as NAME=FIELD: prompt=question
            chosen=better rejected=worse.
        format: format of the rows. plain: the layouts above; sharegpt: conversations of
            {"from", "value"}; alpaca: instruction, perhaps with input, system and
            history; both with chosen and rejected, or with label; auto: the one whose
            fields a row has, which the run says unless it is plain.
    """

    path: str | None = None
    on_bad_row: Literal["fail", "skip"] = "fail"
    eval_share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    on_unwritten: OnUnwritten = "fail"
    columns: tuple[str, ...] = ()
    format: Format = "auto"


@dataclass(frozen=True)
class PreferenceLossConfig:
    """The preference loss and its hyperparameters.

    Attributes:
        name: dpo, robust_dpo, ln_dpo, hinge, ipo, alpha_divergence_dpo,
            jensen_shannon_dpo, wpo, reference_free_dpo, simpo, cpo, orpo, kto,
            apo_zero, apo_down, bco_pair, nca, sppo, discopop or exo, or
            <module>:<function> of one that returns a PreferenceAlgorithm, with
            parameters as in my_module:my_loss?scale=2. kto judges every answer alone:
            it takes pairs apart, and learns from answers with labels as well.
        beta: scale of the implicit reward, beta * log(policy / reference); None for the
            default of the loss.
        label_smoothing: share of the preferences that is assumed to be wrong; None for
            the default of the loss: 0.1 of robust_dpo, 0.001 of exo, which needs more
            than 0, and 0 of the others that have it.
        margin: target reward margin of simpo; None for the default of the loss.
        nll_weight: weight in cpo of the chosen answer's negative log-likelihood; None
            for the default.
        alpha: order of the divergence of alpha_divergence_dpo, in (0, 1]; 1 is the
            forward KL. None for the default.
        tau: temperature at which discopop blends its two losses; None for the default.
        desirable_weight: weight in kto of answers that are labelled desirable; None for
            the default.
        undesirable_weight: weight in kto of answers that are labelled undesirable; None
            for the default.
        reference: Hugging Face directory of the reference policy, or ORG/NAME on the
            hub; None for the model as it began.
        reference_sync_steps: the reference moves to the policy whenever this many steps
            of the run have passed, as in TR-DPO and ProRL; 0 for never.
        reference_mixup: share of the policy in the parameters of the reference that has
            moved; the rest is the reference before. 1 for a copy, as an adapter needs.
    """

    name: str = "dpo"
    beta: Annotated[float | None, POSITIVE] = None
    label_smoothing: Annotated[float | None, Range(0, 0.5, open_high=True)] = None
    margin: Annotated[float | None, ANY] = None
    nll_weight: Annotated[float | None, NOT_NEGATIVE] = None
    alpha: Annotated[float | None, ANY] = None
    tau: Annotated[float | None, ANY] = None
    desirable_weight: Annotated[float | None, NOT_NEGATIVE] = None
    undesirable_weight: Annotated[float | None, NOT_NEGATIVE] = None
    reference: str | None = None
    reference_sync_steps: Annotated[int, NOT_NEGATIVE] = 0
    reference_mixup: Annotated[float, Range(0, 1, open_low=True)] = 1.0


@dataclass(frozen=True)
class OfflineConfig(RunConfig):
    """The options that all programs on a data set share.

    Attributes:
        examples_per_step: demonstrations, pairs or judged answers in a step's batch.
        max_tokens: most tokens of a prompt and its answer together.
        log_every: steps of the run between rows of metrics.
    """

    examples_per_step: Annotated[int, COUNT] = 64
    max_tokens: Annotated[int, COUNT] = 128
    log_every: Annotated[int, COUNT, FREE] = 1
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5, warmup_ratio=0.1)
    )


@dataclass(frozen=True)
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning on chats and texts, or an environment's demonstrations.

    Attributes:
        env: arithmetic, code, facts, gsm8k, guess, instructions, jsonl, lookup, nim,
            text2sql, world, reasoning-gym:<task>, or <module>:<factory>, with options
            as in arithmetic?level=2. None for the rows of `data.path`, in one of the
            forms of `data.format`; arithmetic without a file.
        data: files of chats, texts or tasks.
    """

    env: str | None = None
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True)
class PreferenceConfig(OfflineConfig):
    """Training of a policy on preference pairs or judged answers.

    Attributes:
        data: file of the pairs or judged answers.
        loss: which preference loss is minimised.
    """

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-6, warmup_ratio=0.1)
    )
    data: PairsConfig = field(default_factory=PairsConfig)
    loss: PreferenceLossConfig = field(default_factory=PreferenceLossConfig)


@dataclass(frozen=True)
class RewardConfig(OfflineConfig):
    """Training of a reward model, on preference pairs or on labelled steps.

    Attributes:
        kind: outcome: one reward an answer, from pairs; process: a verdict on each step
            of a solution.
        data: file of the pairs, or of the solutions.
        centering: weight in the loss of the squared sum of a pair's rewards, which
            keeps rewards around 0; of kind outcome.
        margin: factor of the difference between a pair's scores in the file; the
            product is the margin by which its rewards should differ. 0 needs no scores.
            Of kind outcome.
        separator: text between steps; a step is judged at the separator's last token.
            The default is a line break (a shell writes two as $'\\n\\n'); of kind
            process.
    """

    kind: Literal["outcome", "process"] = "outcome"
    data: PairsConfig = field(default_factory=PairsConfig)
    centering: Annotated[float, NOT_NEGATIVE] = 0.01
    margin: Annotated[float, NOT_NEGATIVE] = 0.0
    separator: str = "\n"
