"""The options of distillation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY, POSITIVE

__all__ = ["DistillConfig", "DivergenceName"]

DivergenceName = Literal["sampled", "forward_kl", "reverse_kl", "jsd", "top_k"]


@dataclass(frozen=True)
class DistillConfig:
    """What a student takes from its teacher; for the algorithm distillation.

    Attributes:
        divergence: sampled: the advantage of a token that the student drew is
            log teacher - log student; the others compare whole distributions at every
            token: forward_kl, KL(teacher || student); reverse_kl, KL(student ||
            teacher); jsd, GKD's divergence between the two; top_k, the forward KL from
            the teacher's likeliest tokens.
        data: text that is compared on. samples: the student's own; demonstrations: the
            environment's, as many a step as there would be samples.
        temperature: temperature that divides both models' logits where whole
            distributions are compared.
        beta: share of the teacher in the mixture of jsd, in [0, 1]; 0 is the forward
            KL, 1 the reverse KL. None for 0.5.
        top_k: number of the teacher's likeliest tokens that top_k compares one by one;
            None for 64.
        tail: what top_k does with all other tokens. bucket: compares them as one token
            with their total probability; renormalize: leaves them out. None for bucket.
    """

    divergence: DivergenceName = "sampled"
    data: Literal["samples", "demonstrations"] = "samples"
    temperature: Annotated[float, POSITIVE] = 1.0
    beta: Annotated[float | None, ANY] = None
    top_k: Annotated[int | None, ANY] = None
    tail: Literal["bucket", "renormalize"] | None = None
