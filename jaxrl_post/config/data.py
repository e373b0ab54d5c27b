"""The options of the training data."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["DEFAULT_ENV", "DataConfig", "OnOverlap", "OnUnwritten"]

# The environment if neither an environment nor a file is given.
DEFAULT_ENV = "arithmetic"

OnOverlap = Literal["fail", "drop", "allow"]
OnUnwritten = Literal["fail", "drop", "allow"]


@dataclass(frozen=True)
class DataConfig:
    """Data files for an environment (jsonl, gsm8k), or chats for launch.sft.

    Attributes:
        path: .jsonl or .parquet file to learn from; hf://datasets/ORG/NAME/FILE for one
            on the hub, ORG/NAME@REVISION for a revision of it.
        eval_path: likewise, of what is held out; default: a tenth of the prompts of
            `path`.
        on_bad_row: what to do about a malformed row: fail, stop with an error; skip,
            leave it out, and report how many there were.
        on_overlap: what to do about training tasks whose prompt is held out too, in any
            environment: fail, stop with an error; drop, leave them out of training;
            allow, train on them.
        on_unwritten: what to do about examples and prompts of which the chat template
            leaves something out, such as tool calls, tools or reasoning: fail, stop
            with an error that counts them; drop, leave them out; allow, take what the
            template writes.
    """

    path: str | None = None
    eval_path: str | None = None
    on_bad_row: Literal["fail", "skip"] = "fail"
    on_overlap: OnOverlap = "fail"
    on_unwritten: OnUnwritten = "fail"
