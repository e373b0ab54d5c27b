"""Prompts with instructions that a program verifies, in the form of IFEval's rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from jaxrl_post.conversations import group_of, prompt_of
from jaxrl_post.envs.env import Message, Split, Step, Task, TaskSequence, response
from jaxrl_post.envs.tasks.held_out import TasksOfFiles, split_of
from jaxrl_post.envs.tasks.instructions.constraints import Constraint
from jaxrl_post.envs.tasks.instructions.generated import WrittenRequest, answer, make
from jaxrl_post.envs.tasks.ranges import (
    require_integer,
    require_path_options,
    require_share,
)
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import listed

__all__ = ["Instructions"]

_PROMPTS = ("prompt", "messages")
# Options that only the generated prompts have.
_GENERATED = ("constraints", "slips", "seed", "train_size", "eval_size")


@dataclass(frozen=True)
class Instructions(TasksOfFiles["_Row"]):
    """Prompts whose instructions a program verifies, such as "use no commas".

    The kinds of instructions and their parameters are IFEval's, except the language of
    the response (`checks.KINDS`). Without `path`, prompts with one to `constraints`
    instructions are generated.

    Args:
        path: .jsonl or .json with one object a line, or .parquet (extra `parquet`):
            "prompt" or "messages", "instruction_id_list", the kinds, and "kwargs", a
            list of their parameters (or JSON text of one), null where there are none.
        eval_path: the evaluation rows; without it, one prompt in ten of `path` is held
            out by a hash of its text.
        on_bad_row: "fail" raises at a bad row, "skip" drops it and logs a warning.
        reward: "all" is 1 for a response that fulfils all instructions and 0
            otherwise; "share" is the share of the instructions that it fulfils.
        loose: whether the response may also fulfil an instruction without its
            asterisks, its first line or its last line, as in IFEval's loose accuracy.
            For evaluation: a policy learns to be verbose from it.
        constraints: most instructions of a generated prompt, in [1, 8].
        slips: share of the instructions of a generated prompt, in [0, 1], that its
            demonstration forgets. A model that imitates it writes well and obeys
            seldom.
        seed: of the generated prompts.
        train_size: number of generated training prompts.
        eval_size: number of generated evaluation prompts.

    Raises:
        ValueError: an option is outside its range, or does not fit `path`.

    >>> environment = Instructions(constraints=1)
    >>> task = environment.tasks("train")[3]
    >>> task.messages[0].content
    "Write a short text about rain. Use the words 'quiet' and 'bright'."
    >>> turn = (*task.messages, Message("assistant", "It is quiet and never bright."))
    >>> environment.step(task, turn).reward
    1.0
    """

    path: str | None = None
    eval_path: str | None = None
    on_bad_row: OnBadRow = "fail"
    reward: Literal["all", "share"] = "all"
    loose: bool = False
    constraints: int = 2
    slips: float = 0.0
    seed: int = 0
    train_size: int = 10_000
    eval_size: int = 200

    def __post_init__(self) -> None:
        require_on_bad_row(self.on_bad_row)
        if self.reward not in ("all", "share"):
            raise ValueError(f"reward must be 'all' or 'share', got {self.reward!r}")
        if type(self.loose) is not bool:
            raise ValueError(f"loose must be true or false, got {self.loose!r}")
        require_integer("constraints", self.constraints, 1, 8)
        require_share("slips", self.slips)
        for name in ("train_size", "eval_size"):
            require_integer(name, getattr(self, name), 1, 2**30)
        require_path_options(self, _GENERATED)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "instructions"

    def tasks(self, split: Split) -> Sequence[Task]:
        """The prompts of a split; raises as `TasksOfFiles` has it."""
        if self.path is None:
            size = self.train_size if split == "train" else self.eval_size
            return TaskSequence(size, lambda index: self._generated(split, index))
        return super().tasks(split)

    def _row(self, row: Mapping[str, Any]) -> list[_Row]:
        return _row(row)

    def _text(self, row: _Row) -> str:
        return group_of(row.messages)

    def _task(self, index: int, row: _Row) -> Task:
        return Task(index, row.messages, "", {"constraints": row.constraints})

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Verifies every instruction.

        Returns:
            The last step, with the metrics `solved`, `followed` (the share of the
            instructions that are fulfilled) and `followed/KIND` of each kind.
        """
        said = response(conversation)
        texts = _loosened(said) if self.loose else (said,)
        constraints: tuple[Constraint, ...] = task.data["constraints"]
        kept = [any(map(each.holds, texts)) for each in constraints]
        share = sum(kept) / len(kept)
        metrics = {"solved": float(all(kept)), "followed": share}
        for kind in dict.fromkeys(each.kind for each in constraints):
            of_kind = [
                done
                for done, each in zip(kept, constraints, strict=True)
                if each.kind == kind
            ]
            metrics[f"followed/{kind}"] = sum(of_kind) / len(of_kind)
        reward = share if self.reward == "share" else float(all(kept))
        return Step(reward, True, metrics=metrics)

    def demonstration(self, task: Task) -> str | None:
        """A text that fulfils all instructions, except for `slips`; None for files."""
        topic = task.data.get("topic")
        if topic is None:
            return None
        rng = Random(f"{task.messages[0].content} slips")
        constraints: tuple[Constraint, ...] = task.data["constraints"]
        kept = (each for each in constraints if rng.random() >= self.slips)
        return answer(topic, tuple(kept))

    def _generated(self, split: Split, index: int) -> Task:
        rng = Random(f"{self.seed} {split} {index}")
        request = self._drawn(rng, split)
        data = {"constraints": request.constraints, "topic": request.topic}
        return Task(index, (Message("user", request.prompt),), "", data)

    def _drawn(self, rng: Random, split: Split) -> WrittenRequest:
        while True:
            request = make(rng, self.constraints)
            if split_of(request.prompt) == split:
                return request


@dataclass(frozen=True)
class _Row:
    messages: tuple[Message, ...]
    constraints: tuple[Constraint, ...]


def _row(row: Mapping[str, Any]) -> list[_Row]:
    prompt = next((name for name in _PROMPTS if name in row), _PROMPTS[0])
    for name in (prompt, "instruction_id_list", "kwargs"):
        if name not in row:
            raise BadRowError(f"no field {name!r} (fields: {listed(row)})")
    kinds = _listed(row["instruction_id_list"], "instruction_id_list")
    given = _listed(row["kwargs"], "kwargs")
    if len(kinds) != len(given):
        raise BadRowError(
            "'instruction_id_list' and 'kwargs' must be equally long, got "
            f"{len(kinds)} and {len(given)}"
        )
    constraints = []
    for number, (kind, parameters) in enumerate(zip(kinds, given, strict=True), 1):
        if not isinstance(parameters, dict | None):
            raise BadRowError(
                f"field 'kwargs', {number}: must be an object or null, got "
                f"{type(parameters).__name__}"
            )
        try:
            constraints.append(Constraint(kind, parameters or {}))
        except ValueError as error:
            raise BadRowError(f"instruction {number}: {error}") from None
    return [_Row(prompt_of(row[prompt], prompt), tuple(constraints))]


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        # Parquet has no values of any form; such columns hold JSON.
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRowError(f"field {name!r} is no JSON") from None
    if not isinstance(value, list) or not value:
        raise BadRowError(f"field {name!r} must be a list that is not empty")
    return value


def _loosened(text: str) -> tuple[str, ...]:
    lines = text.split("\n")
    shorter = (lines, lines[1:], lines[:-1], lines[1:-1])
    texts = ["\n".join(each).strip() for each in shorter]
    return (text, *texts, *(each.replace("*", "") for each in texts))
