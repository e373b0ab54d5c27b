"""The options of preference losses, and of the files that they learn from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY, NOT_NEGATIVE, POSITIVE, Range

__all__ = ["PairsConfig", "PreferenceLossConfig", "PreferenceName"]

# AOT is not among them: it compares the sorted margins of a whole batch, and a step may
# see its batch in several microbatches.
PreferenceName = Literal[
    "dpo", "robust_dpo", "ln_dpo", "hinge", "ipo", "alpha_divergence_dpo",
    "jensen_shannon_dpo", "wpo", "reference_free_dpo", "simpo", "cpo", "orpo", "kto",
    "apo_zero", "apo_down", "bco_pair", "nca", "sppo", "discopop", "exo",
]  # fmt: skip


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
    """

    path: str | None = None
    on_bad_row: Literal["fail", "skip"] = "fail"
    eval_share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1


@dataclass(frozen=True)
class PreferenceLossConfig:
    """Which preference loss, and what departs from its paper's defaults.

    Attributes:
        name: preference loss. kto judges every answer alone: it takes pairs apart, and
            learns from answers with labels as well.
        beta: scale of the implicit reward, beta * log(policy / reference); None for the
            default of the loss.
        label_smoothing: share of the preferences that is assumed to be wrong.
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
    """

    name: PreferenceName = "dpo"
    beta: Annotated[float | None, POSITIVE] = None
    label_smoothing: Annotated[float, Range(0, 0.5, open_high=True)] = 0.0
    margin: Annotated[float | None, ANY] = None
    nll_weight: Annotated[float | None, NOT_NEGATIVE] = None
    alpha: Annotated[float | None, ANY] = None
    tau: Annotated[float | None, ANY] = None
    desirable_weight: Annotated[float | None, NOT_NEGATIVE] = None
    undesirable_weight: Annotated[float | None, NOT_NEGATIVE] = None
    reference: str | None = None
