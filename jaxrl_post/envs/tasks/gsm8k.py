r"""GSM8K: grade-school word problems with integer answers, graded by math-verify.

References:
    Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.conversations import text_of
from jaxrl_post.envs.env import Message, Step, Task, response
from jaxrl_post.envs.tasks.held_out import TasksOfFiles
from jaxrl_post.envs.tasks.mathematics.answers import (
    Extraction,
    final_answer,
    is_number,
    require_extraction,
)
from jaxrl_post.envs.tasks.mathematics.reading import equal
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import listed

__all__ = ["GSM8K", "INSTRUCTION"]

INSTRUCTION = (
    'Reason step by step. End with a line "#### <number>" that holds the final answer.'
)

_ANNOTATION = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class GSM8K(TasksOfFiles[Mapping[str, str]]):
    r"""Word problems from rows {"question": ..., "answer": "... #### 72"}.

    The reward is 1 if the response's final answer equals the row's, else 0:
    `final_answer` defines the final answer, and `mathematics.reading.equal` compares.
    Grading needs the extra `math`.

    Args:
        path: the training rows: .jsonl or .json with one object a line, or .parquet
            (extra `parquet`), as the data set's own files are.
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

    def _row(self, row: Mapping[str, Any]) -> list[Mapping[str, str]]:
        return _row(row)

    def _text(self, row: Mapping[str, str]) -> str:
        return row["question"]

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
            TimeoutError: comparing took too much processor time.
        """
        answer = final_answer(response(conversation), extraction=self.extraction)
        correct = float(answer is not None and equal(task.reference, answer))
        metrics = {"correct": correct, "answered": float(answer is not None)}
        return Step(reward=correct, done=True, metrics=metrics)

    def demonstration(self, task: Task) -> str:
        """The row's solution without the calculator annotations `<<48/2=24>>`."""
        return _ANNOTATION.sub("", task.data["solution"])

    def _task(self, index: int, row: Mapping[str, str]) -> Task:
        question, solution = row["question"], row["answer"]
        prompt = f"{question}\n\n{self.instruction}" if self.instruction else question
        reference = final_answer(solution, extraction="strict")
        assert reference is not None, "`_row` has checked it"
        data = {"solution": solution}
        return Task(index, (Message("user", prompt),), reference, data)


def _row(row: Mapping[str, Any]) -> list[Mapping[str, str]]:
    for name in ("question", "answer"):
        if name not in row:
            raise BadRowError(f"no field {name!r} (fields: {listed(row)})")
        text_of(row[name], f"field {name!r}")
    _, mark, ending = row["answer"].rpartition("####")
    if not mark or not is_number(ending):
        got = repr(ending.strip()) if mark else "no '####'"
        raise BadRowError(f"field 'answer' must end with '#### <number>', got {got}")
    return [row]
