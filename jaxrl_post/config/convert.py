"""The options of a conversion."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrl_post.config.fields import ANY

__all__ = ["ConvertConfig"]


@dataclass(frozen=True)
class ConvertConfig:
    """Input and output of a conversion between checkpoint formats.

    Attributes:
        input: a Hugging Face directory, ORG/NAME on the hub, an Orbax model directory,
            a GGUF file (extra `gguf`), an adapter of PEFT, or the directory of a run.
        revision: branch, tag or commit of an --input on the hub.
        output: directory to create; an existing one is never overwritten.
        format: format of the output. Every program's --model reads both; orbax stores
            the arrays as they are in memory, which transformers cannot read.
        dtype: dtype of the tensors; None keeps their dtype. A run that trains in
            bfloat16 has float32 master weights, which float32 writes. For GGUF, None
            means bfloat16 if the file's matrices are bfloat16, else float32.
        step: step of the run whose checkpoint is read; None for the newest.
        base: where the config.json and the tokenizer of a run's model are, or the model
            under an adapter: a directory, or ORG/NAME on the hub; None for the one that
            the run or the adapter names.
        max_shard_gb: largest size of a file's tensors in gigabytes; more are split over
            several files. With orbax, the size at which a file is closed.
        push_to_hub: ORG/NAME of a repository on the Hugging Face hub, to which the
            output is uploaded; None to upload nothing.
        push_public: make that repository public instead of private.
    """

    input: str
    output: str
    revision: str | None = None
    format: Literal["huggingface", "orbax"] = "huggingface"
    dtype: Literal["float32", "bfloat16"] | None = None
    step: Annotated[int | None, ANY] = None
    base: str | None = None
    max_shard_gb: Annotated[float, ANY] = 5.0
    push_to_hub: str | None = None
    push_public: bool = False
