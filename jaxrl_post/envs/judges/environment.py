"""Prompts of a file, whose answers a language model judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jaxrl_post.conversations import prompt_of, text_of
from jaxrl_post.envs.env import Message, Step, Task, response
from jaxrl_post.envs.judges.endpoint import ChatEndpoint
from jaxrl_post.envs.judges.judge import RUBRIC, Judge
from jaxrl_post.envs.tasks.held_out import TasksOfFiles
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import listed

__all__ = ["Judged"]

_PROMPTS = ("prompt", "messages")


@dataclass(frozen=True)
class Judged(TasksOfFiles["_Row"]):
    """Prompts from a JSON Lines or Parquet file; a language model judges the answers.

    With the kind "grade" the judge grades an answer by a rubric, and sees the row's
    answer if it has one. With "compare" it says whether the policy's answer or the
    row's is better, asked in both orders. The reward is in [0, 1]. A judgement without
    a verdict fails its episode, which then has no reward; it is not a reward of 0.

    Args:
        path: .jsonl or .json with one object a line, or .parquet (extra `parquet`).
        url: base URL of the judge, which speaks OpenAI's chat API, such as
            "http://127.0.0.1:8000/v1" of `launch.serve`.
        model: name of the judge's model; "" for the first that the server lists.
        kind: "grade" or "compare".
        rubric: path of a text file that says what a good answer is; None for a general
            one. A row's field "rubric" goes before.
        eval_path: the evaluation rows; without it, one prompt in ten of `path` is held
            out by a hash of its text.
        on_bad_row: "fail" raises at a bad row, "skip" drops it and logs a warning.
        prompt: the field of the prompt; "prompt", or "messages" without it.
        answer: the field of a good answer, which "compare" needs in every row.
        best: the highest grade.
        tries: most times that a question is asked until the answer can be read.
        cache: folder for what the judge said, shared by workers and later runs; None
            to keep it in memory alone.
        key_file: file with an API key; None for none.
        temperature: of the judge.
        max_tokens: most tokens of a judge's answer.
        seconds: of a question, at most; a comparison asks two. It must stay below the
            deadline of a judgement (--rollout.reward-deadline-s).

    Raises:
        ValueError: an option has no such value.
        OSError: the rubric cannot be read.
    """

    path: str
    url: str
    model: str = ""
    kind: Literal["grade", "compare"] = "grade"
    rubric: str | None = None
    eval_path: str | None = None
    on_bad_row: OnBadRow = "fail"
    prompt: str | None = None
    answer: str = "answer"
    best: int = 10
    tries: int = 3
    cache: str | None = None
    key_file: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    seconds: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in ("grade", "compare"):
            raise ValueError(f"kind must be 'grade' or 'compare', got {self.kind!r}")
        require_on_bad_row(self.on_bad_row)
        self._judge(None)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "judged"

    def _text(self, row: _Row) -> str:
        return "\n\n".join(message.content for message in row.messages)

    def _task(self, index: int, row: _Row) -> Task:
        return Task(index, row.messages, row.answer or "", {"rubric": row.rubric})

    def prepare(self) -> None:
        """Asks the judge for its models, so that a wrong address ends the run at once.

        Raises:
            JudgeError: the judge gives no answer.
        """
        self._judge(None).endpoint.find()

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Has the response judged.

        Raises:
            JudgeError: there is no verdict.
        """
        judge = self._judge(task.data["rubric"])
        said, before = response(conversation), conversation[:-1]
        if self.kind == "compare":
            verdict = judge.compare(before, said, task.reference)
        else:
            verdict = judge.grade(before, said, task.reference or None)
        return Step(verdict.reward, done=True, metrics=verdict.metrics)

    def demonstration(self, task: Task) -> str | None:
        """The row's answer; None if it has none."""
        return task.reference or None

    def _judge(self, rubric: str | None) -> Judge:
        endpoint = ChatEndpoint(
            self.url,
            self.model,
            self.cache,
            self.key_file,
            self.temperature,
            self.max_tokens,
            self.seconds,
        )
        return Judge(endpoint, rubric or self._rubric, self.best, self.tries)

    @cached_property
    def _rubric(self) -> str:
        if self.rubric is None:
            return RUBRIC
        return Path(self.rubric).read_text(encoding="utf-8")

    def _row(self, row: Mapping[str, Any]) -> list[_Row]:
        prompt = self.prompt or next((n for n in _PROMPTS if n in row), _PROMPTS[0])
        needed = (prompt, self.answer) if self.kind == "compare" else (prompt,)
        for name in needed:
            if name not in row:
                raise BadRowError(f"no field {name!r} (fields: {listed(row)})")
        texts = [
            None if row.get(name) is None else text_of(row[name], f"field {name!r}")
            for name in (self.answer, "rubric")
        ]
        if self.kind == "compare" and not texts[0]:
            raise BadRowError(
                f"field {self.answer!r} is empty: nothing to compare with"
            )
        return [_Row(prompt_of(row[prompt], prompt), *texts)]


@dataclass(frozen=True)
class _Row:
    messages: tuple[Message, ...]
    answer: str | None
    rubric: str | None
