"""Tasks from a file of prompts and answers, graded by name or by a function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxrl_post.conversations import group_of, prompt_of, text_of
from jaxrl_post.envs.env import (
    Answer,
    Message,
    Split,
    StatelessEnvironment,
    Step,
    Task,
    response,
)
from jaxrl_post.envs.tasks.graders import WeightedGraders
from jaxrl_post.envs.tasks.held_out import TasksOfFiles
from jaxrl_post.envs.tasks.mathematics.answers import Extraction
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import listed

__all__ = ["PromptAnswers"]

# The default fields of a prompt; the first one that a row has is used.
_PROMPTS = ("prompt", "messages")
_ANSWER = "answer"
# Tasks on which functions are tried.
_TRIED = 3


@dataclass(frozen=True)
class PromptAnswers(TasksOfFiles["_Row"]):
    r"""Tasks from a JSON Lines or Parquet file of prompts and answers.

    The grader computes the reward:

    - exact: the response equals the answer; both are stripped of white space.
    - f1: the share of right words, as SQuAD computes it: the F1 of the words of both,
      without case, articles and punctuation. The answer is a text or a list of accepted
      texts; the best match counts.
    - math: math-verify finds the final answers of both equal (extra `math`). The final
      answer of a response is a number after "####" or the content of `\boxed{...}`,
      unless `extraction` is "flexible". In the file, these marks are optional.
      `mathematics.reading.equal` says when answers are equal.
    - regex: the answer is a regular expression (a dot also matches a line break) that
      must match the whole response, stripped of white space.
    - schema: the answer is a JSON schema (an object, or its text), and the last fenced
      block of the response, or all of it without one, must be JSON that is valid under
      it (extra `schema`). The schema is checked when the file is read. It may refer to
      its own parts alone: nothing is fetched. Formats such as "date" are not checked.
    - module:name: a function. It is called with the values that its parameters name,
      of these: `response`, the text; `answer`, the unchanged field of the file;
      `prompt`, the text of the row's prompt (of several messages, their texts with an
      empty line between); `row`, all fields of the row; `finish_reason` and
      `num_tokens` of the response, as `envs.Answer` has them; `task`, the `envs.Task`.
      It returns the reward, a finite real number, also of NumPy, or a bool; or the
      parts of the reward by name, whose sum is the reward. A run tries it on its first
      tasks before it begins.

    Of several graders, as in "math,my_module:brevity", the reward is the sum of their
    values times `weights`. The values are then the parts of the reward, by the names of
    the functions. The first grader that is no function has the metrics `correct` and
    `answered`.

    With `extract`, only its last match in the response is graded (the first group, if
    the expression has groups); a response without a match is wrong.

    Args:
        path: .jsonl or .json with one object a line, or .parquet (extra `parquet`).
        eval_path: the evaluation rows; without it, one prompt in ten of `path` is held
            out by a hash of its text.
        on_bad_row: "fail" raises at a bad row, "skip" drops it and logs a warning.
        prompt: the field of the prompt, a text or a list of {"role", "content"}; the
            default is "prompt", or "messages" in a row without the field "prompt". A
            content may be a list of parts, texts and pictures, and a row may have a
            column `images` (`pictures.rows`).
        answer: the field of the answer, a text or a number; for f1 also a list of
            them, for schema an object, for a function any value. Rows need it unless
            all graders are functions that do not.
        solution: the field of a demonstration, a text; None if there is no such field.
        grader: one of the graders above, or several with commas between.
        weights: a number for each grader, with commas between; "" for 1 each.
        extract: a regular expression, for all graders but functions.
        extraction: for math: "strict", or "flexible", which takes the last number of a
            response without a marked answer.
        instruction: text after the prompt and an empty line.
        system: a system message before the prompt.

    Raises:
        ValueError: the grader does not exist, or an option does not fit the grader.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "sums.jsonl")
    ...     _ = path.write_text('{"prompt": "2+2=", "answer": "4"}')
    ...     environment = PromptAnswers(str(path))
    ...     (task,) = environment.tasks("train")
    >>> turn = (*task.messages, Message("assistant", " 4\n"))
    >>> task.reference, environment.step(task, turn).reward
    ('4', 1.0)
    """

    path: str
    eval_path: str | None = None
    on_bad_row: OnBadRow = "fail"
    prompt: str | None = None
    answer: str = _ANSWER
    solution: str | None = None
    grader: str = "exact"
    weights: str | float = ""
    extract: str | None = None
    extraction: Extraction = "strict"
    instruction: str = ""
    system: str = ""

    def __post_init__(self) -> None:
        require_on_bad_row(self.on_bad_row)
        for name in ("path", "answer", "grader", "instruction", "system"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"{name} must be a text, got {value!r}")
        for name in ("eval_path", "prompt", "solution"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a text, got {value!r}")
        _ = self._grader

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "jsonl"

    @property
    def _messages(self) -> tuple[str, ...]:
        return _PROMPTS if self.prompt is None else (self.prompt,)

    def _text(self, row: _Row) -> str:
        return group_of(row.messages)

    def prepare(self) -> None:
        """Imports the library or the function that the grader needs.

        Raises:
            ModuleNotFoundError: the library is not installed.
        """
        self._grader.prepare()

    def trials(self, split: Split) -> list[tuple[StatelessEnvironment, Task]]:
        """The first tasks, if a function grades."""
        tried = self.tasks(split)[:_TRIED] if self._grader.has_functions else ()
        return [(self, task) for task in tried]

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Grades the response; the grade is the reward.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's answer.

        Returns:
            The last step. Unless functions alone grade, it has the metrics `correct`
            (for f1, whether all words are right) and `answered` (whether there was an
            answer to grade, for schema any JSON).
        """
        said = response(conversation)
        turn = conversation[-1]
        if not isinstance(turn, Answer):
            turn = Answer("assistant", said)
        given = {
            **task.data,
            "response": said,
            "finish_reason": turn.finish_reason,
            "num_tokens": turn.num_tokens,
            "task": task,
        }
        grade = self._grader.grade(given)
        return Step(grade.reward, done=True, metrics=grade.metrics, rewards=grade.parts)

    def demonstration(self, task: Task) -> str | None:
        """The row's solution; without one, a response that the grader calls right."""
        solution = task.data["solution"]
        return self._grader.shown(task.reference) if solution is None else solution

    @cached_property
    def _grader(self) -> WeightedGraders:
        return WeightedGraders.parse(
            self.grader, self.weights, self.extract, self.extraction
        )

    def _task(self, index: int, row: _Row) -> Task:
        *before, last = row.messages
        if self.instruction:
            content = f"{last.content}\n\n{self.instruction}"
            last = replace(last, content=content)
        if self.system:
            before.insert(0, Message("system", self.system))
        reference = ""
        if "answer" in row.data:
            reference = self._grader.reference(row.data["answer"])
        return Task(index, (*before, last), reference, row.data)

    def _row(self, row: Mapping[str, Any]) -> list[_Row]:
        prompt = self.prompt or next((n for n in _PROMPTS if n in row), _PROMPTS[0])
        needed = [prompt, *([self.solution] if self.solution else [])]
        # One that was named in the options must be there.
        if self._grader.needs_answer or self.answer != _ANSWER:
            needed.insert(1, self.answer)
        for name in needed:
            if name not in row:
                raise BadRowError(
                    f"no field {name!r} (fields: {listed(row)}); name the fields, as "
                    "in --env 'jsonl?prompt=question&answer=answer'"
                )
        messages = prompt_of(row[prompt], prompt)
        if self.system and messages[0].role == "system":
            raise BadRowError(
                f"field {prompt!r} has a system message of its own, and the option "
                "'system' gives one; drop the option"
            )
        data: dict[str, Any] = {"solution": None}
        if self.solution:
            data["solution"] = text_of(row[self.solution], f"field {self.solution!r}")
        if self.answer in row:
            data["answer"] = row[self.answer]
            if (reason := self._grader.wrong_with(data["answer"])) is not None:
                raise BadRowError(f"field {self.answer!r} {reason}")
        found = _Row(messages, data)
        # A task is sent to a worker for each response, so it has only what is asked.
        if self._grader.takes("row"):
            data["row"] = dict(row)
        if self._grader.takes("prompt"):
            data["prompt"] = found.text
        return [found]


@dataclass(frozen=True)
class _Row:
    messages: tuple[Message, ...]
    data: Mapping[str, Any]

    @property
    def text(self) -> str:
        return "\n\n".join(message.content for message in self.messages)
