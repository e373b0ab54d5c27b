r"""Grade-school word problems with integer answers, and how a response is graded.

References:
    Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv:2110.14168.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_post.envs.env import Message, Split, Step, Task, response
from jaxrl_post.jsonl import OnBadRow, Row, read_jsonl

__all__ = ["GSM8K", "INSTRUCTION", "Extraction", "final_answer"]

_LOGGER = logging.getLogger(__name__)

type Extraction = Literal["flexible", "strict"]

INSTRUCTION = (
    'Reason step by step. End with a line "#### <number>" that holds the final answer.'
)

# Without a file for evaluation, one question in ten is held out by a hash of its text:
# stable when rows are added or reordered, and both copies of a question fall together.
_HELD_OUT_ONE_IN = 10

# What may surround or group the digits of a number without changing its value.
_DECORATION = re.compile(
    r"\\[,!;: ]|(?<=\d)\{,\}(?=\d)|(?<=\d),(?=\d{3}(?!\d))"
    # Between digits these would be a product or two amounts, not to be joined into one.
    r"|(?<!\d)(?:\\?[$%]|\*+)|(?:\\?[$%]|\*+)(?!\d)",
    re.ASCII,
)
_UNSIGNED = r"(?:\d+(?:\.\d+)?|\.\d+)"
# A minus after a digit, a letter or a closing bracket subtracts: "10-5" ends with 5.
_NUMBER = rf"(?:(?<![\w)\]}}])-)?{_UNSIGNED}(?:/{_UNSIGNED})?"
_PLAIN = re.compile(_NUMBER, re.ASCII)
_MARKED = re.compile(rf"####\s*({_NUMBER})", re.ASCII)
_BRACE = re.compile(r"\\boxed\{|[{}]")
_ANNOTATION = re.compile(r"<<[^<>]*>>")

# Longer than any answer; keeps the algebra of a degenerate response bounded.
_LONGEST_ANSWER = 200


@dataclass(frozen=True)
class GSM8K:
    r"""Word problems from JSON Lines rows {"question": ..., "answer": "... #### 72"}.

    The reward is 1 if math-verify finds the response's final answer equal to the row's,
    else 0; see `final_answer` for what counts as the final answer. Grading needs the
    extra `math` and a main thread (math-verify uses SIGALRM), which a `WorkerPool` has.

    Args:
        path: the training rows.
        eval_path: the evaluation rows; without it, one question in ten of `path` is
            held out by a hash of its text.
        on_bad_row: "fail" at a row that is not as above, or "skip" it and log a
            warning.
        extraction: "strict" calls a response wrong that marks no answer; "flexible"
            takes its last number, which pays for listing numbers until one fits.
        instruction: put after the question, with an empty line between; may be empty.

    Raises:
        ValueError: if `extraction` or `on_bad_row` is none of its values.

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
        _require_extraction(self.extraction)
        if self.on_bad_row not in ("fail", "skip"):
            raise ValueError(
                f"on_bad_row must be 'fail' or 'skip', got {self.on_bad_row!r}"
            )

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
            rows = [row for row in rows if _split_of(row.fields["question"]) == split]
        if not rows:
            raise ValueError(
                f"{path}: no question falls into {split!r} in so small a file; "
                "pass eval_path with rows of its own"
            )
        return tuple(self._task(index, row) for index, row in enumerate(rows))

    def prepare(self) -> None:
        """Imports math-verify, whose first use takes a noticeable part of a second.

        Raises:
            ModuleNotFoundError: if the extra `math` is not installed.
        """
        _equal("1", "1")

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Rewards a final answer that equals the reference with 1, others with 0.

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
        correct = float(answer is not None and _equal(task.reference, answer))
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


def final_answer(text: str, *, extraction: Extraction = "strict") -> str | None:
    r"""The one answer of a response that is graded.

    The last marked answer counts: a number after "####", or what `\boxed{...}` holds.
    So a response may correct itself, but listing candidates gains nothing. Where
    nothing is marked, "strict" takes none, and "flexible" the last number in the text.
    Dollar and percent signs, Markdown's asterisks, thousands separators and LaTeX
    spaces are dropped: "$1,080" is "1080", and "50%" is "50", never 0.5.

    Args:
        text: the response.
        extraction: "strict" or "flexible".

    Returns:
        A number ("1080", "-3.50", "3/4"), or the LaTeX of a box that holds something
        else; None if there is no answer, or one of over 200 characters.

    Raises:
        ValueError: if `extraction` is neither.

    >>> final_answer("She earns $1,080.\n#### 1,080")
    '1080'
    >>> final_answer(r"Not \boxed{5}; it is \boxed{7}.")
    '7'
    >>> final_answer("So 30 + 20 gives 50%.") is None
    True
    >>> final_answer("So 30 + 20 gives 50%.", extraction="flexible")
    '50'
    """
    _require_extraction(extraction)
    # A true minus sign (U+2212) is what typeset text has; numbers are written with "-".
    text = _DECORATION.sub("", text.replace("\N{MINUS SIGN}", "-"))
    start, answer = _last_box(text)
    for marked in _MARKED.finditer(text):
        if marked.start() > start:
            start, answer = marked.start(), marked[1]
    if answer is None and extraction == "flexible":
        for number in _PLAIN.finditer(text):
            answer = number[0]
    return answer if answer is None or len(answer) <= _LONGEST_ANSWER else None


def _last_box(text: str) -> tuple[int, str | None]:
    r"""Position and content of the last \boxed{...} whose braces balance."""
    last, content = -1, None
    open_braces: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace)
        elif open_braces:
            opening = open_braces.pop()
            if opening[0] != "{" and opening.start() > last:
                last = opening.start()
                content = text[opening.end() : brace.start()].strip()
    return last, content or None


def _equal(reference: str, answer: str) -> bool:
    parse, verify = _math_verify()
    # Plain numbers skip the LaTeX parser: it is slower, and reads "3/4." differently.
    expression = answer if _PLAIN.fullmatch(answer) else f"${answer}$"
    return bool(verify(parse(reference), parse(expression)))


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        # Not at the top: it imports sympy, which listing the tasks does not need.
        import math_verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"GSM8K grades with math-verify, and there is no module {error.name!r}: "
            "pip install 'jaxrl_post[math]'",
            name=error.name,
        ) from error
    return math_verify.parse, math_verify.verify


def _check_answer(row: Mapping[str, Any]) -> str | None:
    ending = row["answer"].rpartition("####")[2]
    if "####" not in row["answer"]:
        return "field 'answer' must end with '#### <number>', got no '####'"
    if _PLAIN.fullmatch(_DECORATION.sub("", ending).strip()) is None:
        return f"field 'answer' must end with '#### <number>', got {ending.strip()!r}"
    return None


def _split_of(question: str) -> Split:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) % _HELD_OUT_ONE_IN == 0 else "train"


def _require_extraction(extraction: str) -> None:
    if extraction not in ("flexible", "strict"):
        raise ValueError(
            f"extraction must be 'flexible' or 'strict', got {extraction!r}"
        )
