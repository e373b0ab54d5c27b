r"""GSM8K: grade-school word problems with integer answers, graded by math-verify.

References:
    Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.envs.env import Message, Split, Step, Task, response
from jaxrl_post.envs.tasks.held_out import split_of
from jaxrl_post.envs.tasks.math_answers import (
    Extraction,
    equal,
    final_answer,
    is_number,
    require_extraction,
)
from jaxrl_post.jsonl import OnBadRow, Row, read_jsonl, require_on_bad_row

__all__ = ["GSM8K", "INSTRUCTION"]

_LOGGER = logging.getLogger(__name__)

INSTRUCTION = (
    'Reason step by step. End with a line "#### <number>" that holds the final answer.'
)

_ANNOTATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class GSM8K:
    r"""Word problems from JSON Lines rows {"question": ..., "answer": "... #### 72"}.

    The reward is 1 if math-verify finds the response's final answer equal to the row's,
    else 0; `final_answer` defines the final answer. Grading needs the extra `math` and
    must run in a main thread (math-verify uses SIGALRM), as it does in a `WorkerPool`.

    Args:
        path: the training rows.
        eval_path: the evaluation rows; without it, one question in ten of `path` is
            held out by a hash of its text.
        on_bad_row: "fail" raises at a row of another form, "skip" drops the row and
            logs a warning.
        extraction: "strict" grades a response without a marked answer as wrong;
            "flexible" takes its last number, which rewards guessing many numbers.
        instruction: text after the question and an empty line; may be empty.

    Raises:
        ValueError: if `extraction` or `on_bad_row` is not one of its values.

    >>> import pathlib, tempfile
    >>> row = r'{"question": "2*3?", "answer": "2*3 = <<2*3=6>>6\n#### 6"}'
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "train.jsonl")
    ...     _ = path.write_text(row)
    ...     environment = GSM8K(str(path), instruction="")
    ...     (task,) = environment.tasks("train")
    >>> task.messages[0].content, task.reference
    ('2*3?', '6')
    >>> environment.demonstration(task)
    '2*3 = 6\n#### 6'
    """

    path: str
    eval_path: str | None = None
    on_bad_row: OnBadRow = "fail"
    extraction: Extraction = "strict"
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        require_extraction(self.extraction)
        require_on_bad_row(self.on_bad_row)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "gsm8k"

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The problems of a split, in the file's order.

        Args:
            split: "train" or "eval".

        Raises:
            ValueError: at a bad row under "fail", or if the split is empty.
            OSError: if the file cannot be read.
        """
        separate = split == "eval" and self.eval_path is not None
        path = self.eval_path if separate and self.eval_path else self.path
        rows, report = read_jsonl(
            path,
            fields={"question": str, "answer": str},
            check=_check_answer,
            on_bad_row=self.on_bad_row,
        )
        if report.num_bad:
            _LOGGER.warning("%s", report)
        if self.eval_path is None:
            rows = [row for row in rows if split_of(row.fields["question"]) == split]
        if not rows:
            raise ValueError(
                f"{path}: no question falls into {split!r} in so small a file; "
                "give eval_path (on the command line --data.eval-path), with rows of "
                "its own"
            )
        return tuple(self._task(index, row) for index, row in enumerate(rows))

    def prepare(self) -> None:
        """Imports math-verify; otherwise the first step would wait for the import.

        Raises:
            ModuleNotFoundError: if the extra `math` is not installed.
        """
        equal("1", "1")

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Rewards a final answer equal to the reference with 1, any other with 0.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's answer.

        Returns:
            The last step, with the metrics `correct` and `answered` (whether there was
            a final answer to grade).

        Raises:
            ModuleNotFoundError: if the extra `math` is not installed.
        """
        answer = final_answer(response(conversation), extraction=self.extraction)
        correct = float(answer is not None and equal(task.reference, answer))
        metrics = {"correct": correct, "answered": float(answer is not None)}
        return Step(reward=correct, done=True, metrics=metrics)

    def demonstration(self, task: Task) -> str:
        """The row's solution without the calculator annotations `<<48/2=24>>`."""
        return _ANNOTATION.sub("", task.data["solution"])

    def _task(self, index: int, row: Row) -> Task:
        question, solution = row.fields["question"], row.fields["answer"]
        prompt = f"{question}\n\n{self.instruction}" if self.instruction else question
        reference = final_answer(solution, extraction="strict")
        assert reference is not None, "read_jsonl has checked the row"
        data = {"solution": solution, "line": row.line}
        return Task(index, (Message("user", prompt),), reference, data)


def _check_answer(row: Mapping[str, Any]) -> str | None:
    ending = row["answer"].rpartition("####")[2]
    if "####" not in row["answer"]:
        return "field 'answer' must end with '#### <number>', got no '####'"
    if not is_number(ending):
        return f"field 'answer' must end with '#### <number>', got {ending.strip()!r}"
    return None
