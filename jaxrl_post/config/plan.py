"""The options of `launch.plan`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY
from jaxrl_post.config.lora import AdapterConfig

__all__ = ["PlanConfig", "PlanError"]


class PlanError(ValueError):
    """A plan that cannot be made."""


@dataclass(frozen=True)
class PlanConfig:
    """What to plan.

    Attributes:
        model: a preset, such as llama-3.1-8b (`jaxrl_post.pretrained.presets`), a
            directory with a config.json, or ORG/NAME on the hub.
        revision: branch, tag or commit of a --model on the hub.
        topology: generation and shape of the TPU slice, such as v5e:4x4 or v5p:4x4x4.
        mesh: how many devices each axis of the mesh has, such as fsdp8,tp2; -1 for all
            that are left.
        rows: packed rows of a microbatch; 0 for one on each part into which the mesh
            splits a batch.
        row_tokens: length of a packed row in tokens.
        remat: what the forward pass of a layer keeps for the backward pass, as
            --update.remat of a run.
        scan_layers: compile layers that repeat once, as --update.scan-layers of a run.
        dtype: dtype of the parameters; below float32 the optimizer has float32 masters
            of those that it trains.
        lora: adapter that is trained in place of the model, in float32.
        slots: number of sequences whose keys and values the sampler holds at the same
            time; 0 for a sampler elsewhere.
        slot_tokens: most tokens of such a sequence.
        compiler_options: options of XLA, as NAME=VALUE. A run takes the same through
            LIBTPU_INIT_ARGS="--NAME=VALUE".
        json: file to which the plan is written.
        hlo: directory to which the text of the compiled programs is written.
    """

    model: str
    topology: str
    revision: str | None = None
    mesh: str = "fsdp-1"
    rows: Annotated[int, ANY] = 0
    row_tokens: Annotated[int, ANY] = 4096
    remat: Literal["none", "dots", "full"] = "full"
    scan_layers: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    slots: Annotated[int, ANY] = 0
    slot_tokens: Annotated[int, ANY] = 4096
    compiler_options: tuple[str, ...] = ()
    json: Path | None = None
    hlo: Path | None = None
