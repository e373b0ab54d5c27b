"""Evaluates a model on the tasks of one or several environments."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.evaluate import EvaluateConfig, result_files, with_split
from jaxrl_post.config.files.suite import check_evaluation, naming_part, parts_of
from jaxrl_post.data.generation import not_done
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.files import replace_file
from jaxrl_post.learner.model import Model, versions
from jaxrl_post.programs.build.model import open_named
from jaxrl_post.programs.evaluation.answers import (
    Questions,
    Ready,
    answers,
    open_sampler,
    questions_of,
    ready,
)
from jaxrl_post.programs.evaluation.verdicts import (
    Baseline,
    compared,
    judged,
    read_baseline,
    solved_by_task,
)
from jaxrl_post.programs.hub import fetch
from jaxrl_post.programs.scores import score, solves
from jaxrl_post.programs.template import of_evaluation, template_line
from jaxrl_post.records.report.evaluation import evaluation_page, lines_of
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.sharding import processes

__all__ = ["FailedEvaluationError", "run_evaluation"]


class FailedEvaluationError(Exception):
    """A constraint is broken, or a part is worse than the baseline."""


@dataclasses.dataclass(frozen=True)
class _Files:
    """The files of a part, to be fetched from the hub."""

    data: DataConfig


def run_evaluation(
    config: EvaluateConfig, *, console: Console, command: str = ""
) -> dict[str, Any]:
    """Evaluates, prints tables, and writes the files that the configuration names.

    Nothing is sampled before the tasks of all parts were made and rendered.

    Args:
        config: the options.
        console: for messages to the user.
        command: the command line, for the results.

    Returns:
        The results, as the file for them has them.

    Raises:
        ConfigError: an option makes no sense, or the output exists.
        FailedRolloutsError: not one sample of a part could be judged.
        FailedEvaluationError: a constraint is broken, or a part regressed; all files
            were written.
    """
    begin = time.perf_counter()
    check_evaluation(config)
    template = of_evaluation(config.template, config.model)
    config = dataclasses.replace(config, template=template)
    baseline = None if config.against is None else read_baseline(config.against)
    # The files are fetched for each part.
    opened = fetch(dataclasses.replace(config, data=DataConfig()), console=console)
    commits = dict(opened.commits)
    questions: list[Questions] = []
    for part in parts_of(config):
        part = dataclasses.replace(part, config=with_split(part.config))
        with naming_part(config, part):
            found = fetch(_Files(part.config.data), console=console)
            questions.append(questions_of(part, found.config.data))
        commits |= found.commits
    if baseline is not None:
        baseline.check({each.part.name: each.hashes for each in questions})
    model = _opened(opened.config, questions)
    if line := template_line(template, model.tokenizer):
        console.print(line, markup=False, highlight=False)
    parts: list[Ready] = []
    for each in questions:
        with naming_part(config, each.part):
            parts.append(ready(each, model))
    sampler = open_sampler(parts, model, seed=config.seed)
    rows: list[dict[str, Any]] = []
    completions: list[dict[str, Any]] = []
    unsolved: dict[str, list[dict[str, Any]]] = {}
    for each in parts:
        if name := each.asked.part.name:
            count = f"{len(each.asked.tasks)} tasks of {each.asked.environment.name}"
            console.print(f"part {name}: {count}", markup=False, highlight=False)
        started = time.perf_counter()
        groups = answers(each, model, sampler, console)
        seconds = time.perf_counter() - started
        rows.append(_results(each, groups, baseline, config.against_margin, seconds))
        _tell(each, rows[-1], groups, console)
        said = _completions(each, groups)
        completions += said
        unsolved[name] = _unsolved(each, said, baseline)
    content = {
        **({"parts": rows} if config.suite is not None else rows[0]),
        "passed": not any(line.failed for row in rows for line in lines_of(row)),
        "seconds": time.perf_counter() - begin,
        "command": command,
        "versions": versions(),
        "config": rows[0]["config"] if config.suite is None else _plain(config),
        "hub": commits,
    }
    if baseline is not None:
        content["alone"] = [*baseline.alone([each.part.name for each in questions])]
        for told in content["alone"]:
            console.print(told, markup=False, style="yellow")
    if config.output is not None and not processes.index():
        results, page, rest = result_files(config)
        replace_file(rest, "".join(json.dumps(row) + "\n" for row in completions))
        replace_file(page, evaluation_page(content, unsolved))
        replace_file(results, json.dumps(content, indent=2) + "\n")
        told = f"results: {results}\npage: {page}\ncompletions: {rest}"
        console.print(told, markup=False)
    _check(rows, console)
    return content


def _opened(config: EvaluateConfig, questions: Sequence[Questions]) -> Model:
    """Opens the model; the tokenizer of a preset is made for all environments."""
    # Parts may have the same tasks; a tokenizer needs them once.
    by_options = {
        (part.config.env, part.config.data, part.config.tools): each.environment
        for each in questions
        for part in [each.part]
    }
    first, *others = by_options.values()
    return open_named(
        config,
        make_tokenizer=partial(environment_tokenizer, first, others=others),
        template=config.template,
    )


def _results(
    part: Ready,
    groups: Sequence[Group],
    baseline: Baseline | None,
    margin: float,
    seconds: float,
) -> dict[str, Any]:
    """The results of a part, as the file for them has them."""
    own, config = part.asked.part, part.asked.part.config
    parts = {i: task.part for i, task in enumerate(part.asked.tasks)}
    solved = config.solved_reward
    scores = score(groups, solved_reward=solved, parts=parts)
    by_task = solved_by_task(part.asked.hashes, groups, solved_reward=solved)
    sampling = _plain(part.sampling)
    found = None
    if baseline is not None:
        found = compared(own.name, by_task, sampling, baseline, margin=margin)
    verdicts = [judged(each, groups, solved_reward=solved) for each in own.constraints]
    return {
        **({"name": own.name, "kind": own.kind} if own.name else {}),
        **dataclasses.asdict(scores),
        "constraints": [
            {
                **_plain(each.constraint),
                "value": each.value,
                "interval": each.interval,
                "verdict": each.verdict,
                "failed": each.failed,
                "known": each.known,
            }
            for each in verdicts
        ],
        "against": found
        and {
            **_plain(found.paired),
            "verdict": found.paired.verdict,
            "regressed": found.regressed,
            "differs": found.differs,
        },
        "seconds": seconds,
        "sampling": sampling,
        "not_done": dict(part.unsupported),
        "config": _plain(config),
        "by_task": by_task,
    }


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass as JSON holds it."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


def _tell(
    part: Ready, row: Mapping[str, Any], groups: Sequence[Group], console: Console
) -> None:
    """Prints the scores and the verdicts of a part, and what else is worth knowing."""
    config = part.asked.part.config
    which = f"(of {part.asked.total:,} {config.split} tasks)"
    if config.data.path is not None and config.data.path == config.data.eval_path:
        which = f"(of {part.asked.total:,} rows of {Path(config.data.path).name})"
    console.print(_table(config, part.sampling, row, which))
    if lines := [*lines_of(row)]:
        table = Table("verdict", "", "")
        for line in lines:
            style = "bold red" if line.failed else None
            table.add_row(line.verdict, line.asked, line.found, style=style)
        console.print(table)
    against = row["against"]
    if against and against["unpaired"]:
        told = f"{against['unpaired']} tasks are in one of the two evaluations alone"
        console.print(told, markup=False, style="yellow")
    if against and against["differs"]:
        told = f"the baseline was sampled otherwise: {', '.join(against['differs'])}"
        console.print(told, markup=False, style="yellow")
    if told := not_done(part.unsupported):
        console.print(told, markup=False, style="yellow")
    _tell_limits(groups, console)
    errors = [e.error for group in groups for e in group.episodes if e.error]
    if errors:
        console.print(f"the first failure: {errors[0]}", markup=False, style="red")


def _check(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Raises FailedEvaluationError if a verdict failed; else says that none did."""
    lines = [line for row in rows for line in lines_of(row)]
    if failed := [line for line in lines if line.failed]:
        told = "".join(
            f"\n  {line.part + ', ' if line.part else ''}{line.asked}: {line.verdict}; "
            f"{line.found}"
            for line in failed
        )
        raise FailedEvaluationError(f"failed {len(failed)} of {len(lines)}:{told}")
    if lines:
        console.print("passed: no constraint is broken, and no part regressed")


def _tell_limits(groups: Sequence[Group], console: Console) -> None:
    """Prints how many episodes a limit ended before their environment was done."""
    ends = [e.finish_reason for group in groups for e in group.episodes]
    for reason, option in (
        ("turn_limit", "--max-turns"), ("token_limit", "--max-prompt-tokens")
    ):  # fmt: skip
        if count := ends.count(reason):
            console.print(
                f"{count} of {len(ends)} episodes were not over when {option} ended "
                "them",
                markup=False,
                style="yellow",
            )


def _drawn(sampling: SamplingParams) -> str:
    """Sampling parameters as text."""
    if sampling.temperature == 0:
        return f"greedy, {sampling.max_tokens} tokens at most"
    cuts = {"top-k": sampling.top_k, "min-p": sampling.min_p}
    cuts |= {"top-p": sampling.top_p} if sampling.top_p < 1 else {}
    parts = [f"{name} {value:g}" for name, value in cuts.items() if value]
    parts.append(f"{sampling.max_tokens} tokens at most")
    return ", ".join([f"temperature {sampling.temperature:g}", *parts])


def _table(
    config: EvaluateConfig, sampling: SamplingParams, row: Mapping[str, Any], which: str
) -> Table:
    low, high = (f"{100 * bound:.1f}" for bound in row["interval"])
    title = f"{config.model} on {config.env}"
    table = Table("", "", title=title, show_header=False)
    lines = [
        ("accuracy", f"{100 * row['accuracy']:.1f}% (95%: {low} to {high})"),
        *((f"pass@{k}", f"{100 * v:.1f}%") for k, v in row["pass_at"].items()),
        ("mean reward", f"{row['mean_reward']:.4g}"),
        ("tokens", f"{row['mean_tokens']:.1f} mean, {row['max_tokens']} most"),
        ("ended by itself", f"{100 * row['stopped']:.1f}%"),
        *((name, f"{value:.4g}") for name, value in row["metrics"].items()),
        ("samples", f"{row['samples']}, of {row['tasks']} tasks {which}"),
        ("sampling", _drawn(sampling)),
        ("failed judgements", str(row["failed"])),
        ("seconds", f"{row['seconds']:.1f}"),
    ]
    for name, value in lines:
        table.add_row(name, value)
    return table


def _completions(part: Ready, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row for each sample, for the file of completions."""
    name, solved = part.asked.part.name, part.asked.part.config.solved_reward
    named = {"part": name} if name else {}
    return [{**named, **_completion(e, solved)} for g in groups for e in g.episodes]


def _unsolved(
    part: Ready, rows: Sequence[Mapping[str, Any]], baseline: Baseline | None
) -> list[dict[str, Any]]:
    """The samples that did not solve their task, for the page.

    Args:
        part: what was asked.
        rows: of `_completions`, task by task.
        baseline: tells which tasks it solved, in all of its samples.
    """
    before = {} if baseline is None else baseline.by_task.get(part.asked.part.name, {})
    count = part.rollout.samples_per_prompt
    return [
        {**row, "lost": all(before.get(hashed, [0]))}
        for index, hashed in enumerate(part.asked.hashes)
        for row in rows[index * count : (index + 1) * count]
        if not row["solved"]
    ]


def _completion(episode: Episode, solved_reward: float) -> dict[str, Any]:
    return {
        "task_id": episode.task_id,
        "sample_index": episode.sample_index,
        "prompt": episode.prompt_text,
        "completion": episode.transcript,
        "reward": episode.reward,
        "solved": solves(episode, solved_reward),
        "finish_reason": episode.finish_reason,
        "num_tokens": episode.num_sampled,
        "turns": [
            {
                "heard": turn.heard,
                "text": turn.text,
                "reward": turn.reward,
                "finish_reason": turn.finish_reason,
                "num_tokens": len(turn.sampled),
            }
            for turn in episode.turns
        ],
        "error": episode.error,
        "metrics": dict(episode.metrics),
    }
