"""The options of a conversion."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY

__all__ = ["ConvertConfig"]


@dataclass(frozen=True)
class ConvertConfig:
    """What to read, and what to write.

    Attributes:
        input: a Hugging Face directory, ORG/NAME on the hub, an Orbax model directory,
            or the directory of a run.
        revision: branch, tag or commit of a model on the hub.
        output: the directory to make; nothing is overwritten.
        format: of the output. Every program's --model reads either; Orbax's arrays are
            as the model has them in memory, and transformers does not read them.
        dtype: of the tensors; None for that in which they are. A run that trains in
            bfloat16 has float32 master weights: float32 writes those.
        step: of a run's checkpoint; None for the newest.
        base: of a run: directory, or ORG/NAME on the hub, with the config.json and the
            tokenizer of its model; None for the one that the run names.
        max_shard_gb: gigabytes of tensors in a file; more is split. With orbax, the
            size at which a file is closed.
    """

    input: str
    output: str
    revision: str | None = None
    format: Literal["huggingface", "orbax"] = "huggingface"
    dtype: Literal["float32", "bfloat16"] | None = None
    step: Annotated[int | None, ANY] = None
    base: str | None = None
    max_shard_gb: Annotated[float, ANY] = 5.0
