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
        revision: branch, tag or commit of a model on the hub.
        topology: generation and shape of the slice, such as v5e:4x4 or v5p:4x4x4.
        mesh: as of a run, such as fsdp8,tp2.
        rows: packed rows of a microbatch; 0 for one a part of the batch.
        row_tokens: length of a packed row.
        remat: what the backward pass keeps of a layer.
        scan_layers: as of a run.
        dtype: of the parameters; below float32 the optimizer has float32 masters of
            those that it trains.
        lora: of a run that trains an adapter, which is float32.
        slots: sequences whose keys and values the sampler holds at the same time; 0
            for a sampler elsewhere.
        slot_tokens: tokens of such a sequence.
        compiler_options: of XLA, as NAME=VALUE. A run takes the same through
            LIBTPU_INIT_ARGS="--NAME=VALUE".
        json: file to write the plan to.
        hlo: directory to write the compiled programs' text to.
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
