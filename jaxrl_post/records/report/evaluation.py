"""Fills evaluation.html.jinja with the results of an evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jaxrl_post
from jaxrl_post.messages import PICTURE
from jaxrl_post.records import notation
from jaxrl_post.records.report.templates import template

__all__ = ["MAX_SAMPLES", "Line", "evaluation_page", "lines_of"]

MAX_SAMPLES = 6  # Most samples of a part that the page shows.
MAX_CHARACTERS = 2000  # Most that a prompt or completion shows.


class Line(NamedTuple):
    """A verdict in words: the part, the question, the answer, and whether it failed."""

    part: str
    asked: str
    found: str
    verdict: str
    failed: bool


def lines_of(part: Mapping[str, Any]) -> Iterator[Line]:
    """Yields the verdicts on a part of an evaluation.

    Args:
        part: as the results have it.
    """
    name = part.get("name", "")
    for each in part["constraints"]:
        bounds = (("at least", each["at_least"]), ("at most", each["at_most"]))
        told = " and ".join(
            f"{word} {bound:g}" for word, bound in bounds if bound is not None
        )
        if each["value"] is None:
            found = f"not measured; there are {', '.join(each['known'])}"
        else:
            low, high = each["interval"]
            found = f"{each['value']:.4g} (95%: {low:.4g} to {high:.4g})"
        strict = ", strict" if each["strict"] else ""
        yield Line(
            name,
            f"{each['metric']} {told}{strict}",
            found,
            each["verdict"],
            each["failed"],
        )
    against = part["against"]
    if against is not None:
        yield Line(
            name,
            "accuracy against the baseline",
            _difference(against),
            _compared(against)["verdict"],
            against["regressed"],
        )


def evaluation_page(
    results: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str:
    """Returns the document, with every text escaped; it loads and runs nothing.

    Args:
        results: of an evaluation, as its JSON file has them.
        samples: of each part by name, the samples that did not solve their task, with
            `lost` where the baseline did; at most `MAX_SAMPLES` are shown.
    """
    suite = "parts" in results
    parts = results["parts"] if suite else [results]
    config = results["config"]
    lines = [line for part in parts for line in lines_of(part)]
    failed = sum(line.failed for line in lines)
    undecided = sum(line.verdict == "undecided" for line in lines)
    seconds = notation.duration(results["seconds"])
    count = f"{len(parts)} parts" if suite else config["env"]
    return template("evaluation.html.jinja").render(
        title=f"Evaluation of {config['model']}",
        summary=f"{count} · {seconds}",
        facts=_facts(config, results),
        command=results["command"],
        verdict=f"{failed} failed" if failed else "passed",
        failed=bool(failed),
        undecided=undecided,
        suite=suite,
        rows=[_row(part) for part in parts],
        lines=lines,
        compared=[
            {"name": part.get("name", ""), **_compared(part["against"])}
            for part in parts
            if part["against"]
        ],
        alone=results.get("alone", []),
        failures=[
            _failures(part, samples.get(part.get("name", ""), ())) for part in parts
        ],
        version=jaxrl_post.__version__,
    )


def _facts(config: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, str]:
    facts = {
        "Suite": config["suite"],
        "Baseline": config["against"],
        "Versions": ", ".join(f"{k} {v}" for k, v in results["versions"].items()),
    }
    return {name: value for name, value in facts.items() if value}


def _row(part: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of a part, and the places of its interval on a line of 100."""
    low, high = part["interval"]
    return {
        "name": part.get("name", part["config"]["env"]),
        "kind": part.get("kind", part["config"]["split"]),
        "env": part["config"]["env"],
        "tasks": part["tasks"],
        "samples": part["samples"],
        "accuracy": notation.percent(part["accuracy"]),
        "interval": f"{100 * low:.1f} to {100 * high:.1f}",
        "low": f"{100 * low:.2f}%",
        "width": f"{100 * (high - low):.2f}%",
        "at": f"{100 * part['accuracy']:.2f}%",
        "reward": notation.number(part["mean_reward"]),
        "tokens": notation.number(part["mean_tokens"]),
        "stopped": notation.percent(part["stopped"]),
        "failed": part["failed"],
        "metrics": [
            *((f"pass@{k}", notation.percent(v)) for k, v in part["pass_at"].items()),
            *((name, f"{value:.4g}") for name, value in part["metrics"].items()),
        ],
    }


def _difference(against: Mapping[str, Any]) -> str:
    found = _compared(against)
    return (
        f"{found['before']} to {found['after']}: {found['difference']} points (95%: "
        f"{found['interval']}), p {found['p']}, on {against['tasks']} tasks"
    )


def _compared(against: Mapping[str, Any]) -> dict[str, Any]:
    """The texts of a comparison."""
    before, after = map(notation.percent, against["means"])
    low, high = (f"{100 * bound:+.1f}" for bound in against["interval"])
    differs = ", ".join(against["differs"])
    return {
        **against,
        "before": before,
        "after": after,
        "difference": f"{100 * against['difference']:+.1f}",
        "interval": f"{low} to {high}",
        "p": f"{against['p_value']:.2g}",
        "verdict": "regressed" if against["regressed"] else against["verdict"],
        "note": against["method"]
        + (f"; sampled otherwise: {differs}" if differs else ""),
    }


def _failures(
    part: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    shown = sorted(samples, key=lambda row: not row["lost"])[:MAX_SAMPLES]
    return {
        "name": part.get("name", part["config"]["env"]),
        "count": len(samples),
        "left": len(samples) - len(shown),
        "samples": [
            {
                **row,
                "prompt": _excerpt(row["prompt"]),
                "completion": _excerpt(row["completion"]),
                "error": _excerpt(row["error"]),
                "reward": "none"
                if row["reward"] is None
                else notation.number(row["reward"]),
            }
            for row in shown
        ],
    }


def _excerpt(written: str) -> str:
    left = len(written) - MAX_CHARACTERS
    more = f"\n[{left} more characters]" if left > 0 else ""
    return written[:MAX_CHARACTERS].replace(PICTURE, "[picture]") + more
