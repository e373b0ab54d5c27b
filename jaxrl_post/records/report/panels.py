"""The metrics that a report charts, by heading."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from jaxrl_post.records import notation
from jaxrl_post.records.metric_table import (
    ACCURACY,
    MISMATCH,
    REWARD,
    TOKENS_PER_SECOND,
    TRUNCATED,
    row_of,
)

__all__ = [
    "FAILED",
    "IDLE",
    "MACHINE",
    "PHASES",
    "SECTIONS",
    "SPEED",
    "STACKS",
    "STEP_TIME",
    "Panel",
    "Stack",
    "named",
]

STEP_TIME = "time/step"
FAILED = "rollout/failed"


@dataclass(frozen=True)
class Panel:
    """One metric's chart: its title, and the format of its values.

    `<name>` in metric and title stands for any name, each with a chart of its own.
    """

    metric: str
    title: str
    form: Callable[[float], str] = notation.number
    width: str = ""
    factor: float = 1.0  # The shown value is factor * metric.
    smoothed: bool = True
    linear: bool = False

    @property
    def unit(self) -> str:
        """The metric's unit; empty for a metric that metrics.toml does not have."""
        row = row_of(self.metric)
        return "" if row is None else row.unit


def named(panel: Panel, metrics: Iterable[str]) -> Iterator[Panel]:
    """Yields a panel for each metric for which the panel's `<name>` stands.

    >>> [each.title for each in named(Panel("a/<name>", "A of <name>"), ["a/b", "c"])]
    ['A of b']
    """
    before, hole, _ = panel.metric.partition("<name>")
    if not hole:
        yield panel
        return
    for metric in sorted(metrics):
        if re.fullmatch(rf"{re.escape(before)}[^/]+", metric):
            title = panel.title.replace(hole, metric.removeprefix(before))
            yield replace(panel, metric=metric, title=title)


@dataclass(frozen=True)
class Stack:
    """Metrics that add up, in one chart: their names there, from the bottom up.

    The number above the chart is the mean, over the steps, of the sum.
    """

    title: str
    unit: str
    layers: tuple[tuple[str, str], ...] = ()
    form: Callable[[float], str] = notation.number
    width: str = "half"


SECTIONS = (
    (
        "Learning",
        (
            Panel(REWARD, "Reward", width="half"),
            Panel(
                ACCURACY,
                "Held-out accuracy",
                "{:.1f}%".format,
                width="half",
                factor=100.0,
                smoothed=False,
            ),
        ),
    ),
    (
        "Rollouts",
        (
            Panel(TRUNCATED, "Answers cut", notation.percent, smoothed=False),
            Panel("rollout/groups_with_spread", "Groups with spread", notation.percent),
            Panel("reward/std", "Spread of rewards"),
            Panel("rollout/completion_length", "Completion length"),
            Panel("rollout/completion_length_ended", "Length of ended answers"),
            Panel("rollout/completion_length_min", "Shortest answer", smoothed=False),
            Panel("rollout/completion_length_max", "Longest answer", smoothed=False),
        ),
    ),
    (
        "Policy",
        (
            Panel("policy/kl_to_reference", "KL to reference"),
            Panel("reference/last_sync", "Reference of step", smoothed=False),
            Panel("policy/clip_fraction_low", "Clipped below", notation.percent),
            Panel("policy/clip_fraction_high", "Clipped above", notation.percent),
            Panel("policy/kl_to_proximal", "KL to proximal"),
            Panel("mismatch/kl", "KL of sampler and trainer"),
            Panel("policy/entropy", "Entropy"),
            Panel(MISMATCH, "Sampler mismatch", notation.ratio),
        ),
    ),
    (
        "Agents and tools",
        (
            Panel("rollout/turns", "Turns", width="half"),
            Panel("env/tools/calls", "Tool calls", width="half"),
            Panel("env/tools/failed", "Failed calls", width="half"),
            Panel("env/tools/broken", "Unreadable calls", width="half"),
        ),
    ),
    (
        "Critic",
        (
            Panel("critic/explained_variance", "Explained variance"),
            Panel("critic/loss", "Critic's loss"),
            Panel("critic/value", "Value"),
        ),
    ),
    (
        "Implicit reward model",
        (
            Panel("prm/accuracy", "Accuracy on outcomes", notation.percent),
            Panel("prm/loss", "Its loss"),
            Panel("prm/process_reward_std", "Spread of process rewards"),
        ),
    ),
    (
        "Preferences",
        (
            Panel("preference/accuracy", "Accuracy"),
            Panel("preference/margin", "Margin"),
            Panel("eval/margin", "Held-out margin"),
        ),
    ),
    (
        "Steps",
        (
            Panel("process/first_error_accuracy", "First error"),
            Panel("process/step_accuracy", "Steps judged right"),
            Panel("eval/step_accuracy", "Held-out steps judged right", smoothed=False),
        ),
    ),
    (
        "Distillation",
        (
            Panel("distill/divergence", "Divergence from the teacher"),
            Panel("distill/teacher_entropy", "Teacher's entropy"),
        ),
    ),
    (
        "Experts",
        (
            Panel(
                "router/busiest_expert",
                "Busiest expert",
                notation.ratio,
            ),
            Panel("router/unused_experts", "Unused experts"),
            Panel("router/balance_loss", "Balance loss"),
            Panel("router/z_loss", "Router z-loss"),
        ),
    ),
    (
        "Optimization",
        (
            Panel("train/loss", "Loss"),
            Panel("eval/loss", "Held-out loss", smoothed=False),
            Panel("train/grad_norm", "Gradient norm"),
            Panel("train/learning_rate", "Learning rate", smoothed=False),
            Panel(FAILED, "Failed rollouts", smoothed=False),
        ),
    ),
    (
        "Watch",
        (
            Panel("grader/<name>", "Score by <name>"),
            Panel("grader_gap/<name>", "Reward minus <name>"),
            Panel("eval/grader/<name>", "Held-out score by <name>", smoothed=False),
            Panel("grader_failed/<name>", "Not graded by <name>", notation.percent),
            Panel("time/graders", "Time of graders", notation.duration),
            Panel("correlation/length", "Reward and length"),
            Panel("correlation/repetition", "Reward and repetition"),
            Panel("correlation/echo", "Reward and echo"),
            Panel("correlation/injection", "Reward and injection"),
            Panel("rollout/repetition", "Repetition"),
            Panel("rollout/echo", "Echo of the prompt"),
            Panel("rollout/addressed", "Answers to a judge", notation.percent),
        ),
    ),
)
# Charts at the end of the sections.
STACKS = {
    "Agents and tools": (
        Stack(
            "Tool errors by kind",
            "env/tools/errors/*, per episode, mean of all steps",
            (
                ("env/tools/errors/unreadable", "unreadable"),
                ("env/tools/errors/unknown_tool", "unknown tool"),
                ("env/tools/errors/bad_arguments", "bad arguments"),
                ("env/tools/errors/tool_failed", "tool failed"),
                ("env/tools/errors/slow", "slow"),
                ("env/tools/errors/too_many", "too many"),
                ("env/tools/errors/too_late", "too late"),
            ),
        ),
        Stack(
            "Episodes cut by a limit",
            "share of the episodes, mean of all steps",
            (
                ("rollout/turn_limit", "limit of turns"),
                ("rollout/token_limit", "limit of tokens"),
            ),
            form=notation.percent,
        ),
        Stack(
            "Calls of agents by kind",
            "env/agent_*, per episode, mean of all steps",
            (
                ("env/agent_first", "first"),
                ("env/agent_bridged", "bridged"),
                ("env/agent_branched", "branched"),
                ("env/agent_again", "again"),
                ("env/agent_edited", "edited"),
                ("env/agent_unbridged", "unbridged"),
            ),
        ),
    ),
    "Optimization": (
        Stack(
            "Failed rollouts by kind",
            "rollout/failed/*, per step, mean of the steps with any",
            (
                ("rollout/failed/raised", "raised"),
                ("rollout/failed/unreachable", "unreachable"),
                ("rollout/failed/timeout", "time out"),
                ("rollout/failed/crashed", "crashed"),
                ("rollout/failed/invalid", "invalid"),
                ("rollout/failed/ended", "ended"),
                ("rollout/failed/sampler", "sampler"),
                ("rollout/failed/tools", "tools"),
                ("rollout/failed/reply", "reply"),
                ("rollout/failed/other", "other"),
            ),
        ),
    ),
    "Watch": (
        Stack(
            "Raised rules",
            "watch/alarms, mean of all steps",
            (("watch/alarms", "raised"),),
        ),
        Stack(
            "Batch against episodes",
            "audit/*, shares, mean of all steps",
            (
                ("audit/retokenized", "retokenized"),
                ("audit/unsampled", "unsampled"),
                ("audit/untrained", "untrained"),
                ("audit/stops_untrained", "stops untrained"),
                ("audit/misplaced", "misplaced"),
                ("audit/advantage", "advantage"),
            ),
            form=notation.percent,
        ),
    ),
}
PHASES = (
    ("time/data", "data"),
    ("time/rollout", "rollout"),
    ("time/reward", "reward"),
    ("time/logprobs", "log-probs"),
    ("time/prm", "reward model"),
    ("time/train", "train"),
    ("time/publish", "publish"),
    ("time/checkpoint", "checkpoint"),
)
# In a report with a timeline.
IDLE = (
    Panel("idle/trainer", "Trainer idle", notation.percent, linear=True),
    Panel("idle/samplers", "Samplers idle", notation.percent, linear=True),
)
SPEED = (
    Panel(TOKENS_PER_SECOND, "Throughput", width="tall"),
    Panel(
        "time/compilations",
        "Sampler programs",
        smoothed=False,
    ),
    Panel(
        "time/train_compilations",
        "Training programs",
        smoothed=False,
    ),
)
# In runs with a watch.
MACHINE = (
    Panel("host/memory_bytes", "Memory of process 0", width="half"),
    Panel("host/memory_share", "Memory taken", notation.percent, width="half"),
    Panel("host/disk_free_bytes", "Free on the disk", width="half"),
    Panel("host/disk_checkpoints", "Room for checkpoints", width="half"),
    Panel("retries/disk_s", "Waits for room on the disk", width="half"),
    Panel("retries/judges_s", "Waits for servers", width="half"),
)
