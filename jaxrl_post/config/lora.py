"""The options of adapters."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import DECAY, NOT_NEGATIVE, POSITIVE

__all__ = ["AdapterConfig"]


@dataclass(frozen=True)
class AdapterConfig:
    """Training an adapter in place of the model's own parameters.

    A value head or a process reward model's head is trained in full together with the
    adapter.

    Attributes:
        rank: rank of the adapter's matrices (LoRA); 0 for no adapter, all parameters
            are trained.
        alpha: scale of the adapter: its product of matrices is multiplied by alpha /
            rank.
        targets: names of the matrices to adapt: query and value, or q_proj and v_proj,
            as PEFT names them in the model's family. A name such as qkv_proj stands for
            all that it joins. None, or all-linear, for all of attention, recurrences
            and MLPs, except the experts'.
        rank_stabilized: scale by alpha / sqrt(rank) instead (rsLoRA).
        dora: train magnitude and direction of a matrix separately (DoRA).
        dropout: probability with which an entry of what the adapter's first matrix
            multiplies is dropped in training; sampling, evaluations, references and the
            log-probs before an update have no dropout.
        quantize: hold the frozen matrices in 8 bits (int8) or 4 bits (nf4); None holds
            them as they are.
        path: adapter of PEFT with whose values the run begins, over `model`: a
            directory, or ORG/NAME on the hub. It has the rank, alpha, targets,
            rank_stabilized and dora, so these options are not given, or are the same.
            Without a `model`, the one that the adapter names is under it. None for a
            new adapter. A critic's adapter is always new.
    """

    rank: Annotated[int, NOT_NEGATIVE] = 0
    alpha: Annotated[float, POSITIVE] = 32.0
    targets: tuple[str, ...] = ()
    rank_stabilized: bool = False
    dora: bool = False
    dropout: Annotated[float, DECAY] = 0.0
    quantize: Literal["int8", "nf4"] | None = None
    path: str | None = None
