"""One name, one thing: the containers that a step passes on are each defined once."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxrl_post"
# Classes that a reader of the step meets.
ONCE = {
    "Admission", "Answer", "Buffer", "Collector", "Completion", "Dialogue", "Engine",
    "Episode", "EpisodeLimits", "Flight", "Group", "Judged", "Judgement",
    "Judgements", "Limits", "Message", "Outcome", "Published", "RunResult", "Sampler",
    "SamplingParams", "Settings", "Step", "Task", "TokenBatch", "Tokens", "Trainer",
    "Turn", "Update", "Updater",
}  # fmt: skip
# Public names of several classes, all together; may only fall.
MOST = 25


def defined() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name] += 1
    return found


def test_what_a_step_passes_on_has_a_name_of_its_own():
    found = defined()
    assert {name: found[name] for name in ONCE if found[name] > 1} == {}
    assert found["Turn"] == found["Episode"] == found["Group"] == found["Tokens"] == 1


def test_fewer_names_are_shared():
    shared = sorted(name for name, count in defined().items() if count > 1)
    assert len(shared) <= MOST, shared
