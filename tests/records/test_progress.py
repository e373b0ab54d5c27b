"""The progress of a run, on a terminal and in a file."""

import io
import threading

import pytest
from rich.console import Console

from jaxrl_post.records.progress import Progress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(total_steps: int, interval: float) -> tuple[io.StringIO, Clock, Progress]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=20)
    progress = Progress(
        console, total_steps=total_steps, interval=interval, clock=clock
    )
    return out, clock, progress


def test_plain_lines(tmp_path):
    out, clock, progress = plain(total_steps=10, interval=0.0)
    with progress:
        clock.now += 30.0
        progress.update(
            1,
            {
                "reward/mean": 0.25,
                "eval/accuracy": 0.5,
                "throughput/tokens_per_second": 18_432.0,
                "mismatch/token_mult_prob_error": 1.00312,
            },
        )
        clock.now += 4.0
        progress.update(2, {"reward/mean": 0.5})
        clock.now += 2.0
        progress.update(4, {})
    assert out.getvalue().splitlines() == [
        "step 1/10  reward 0.25  accuracy 50.0% at 1  18.4k tokens/s  mismatch 1.0031",
        "step 2/10  reward 0.5  accuracy 50.0% at 1  18.4k tokens/s"
        "  mismatch 1.0031 at 1  4.0 s/step  ETA 32 s",
        "step 4/10  reward 0.5 at 2  accuracy 50.0% at 1  18.4k tokens/s"
        "  mismatch 1.0031 at 1  2.5 s/step  ETA 15 s",
    ]


def interrupt(progress: Progress, clock: Clock) -> None:
    """Does three steps, and then the user types Ctrl-C."""
    with progress:
        for step in (1, 2, 3):
            clock.now += 2.0
            progress.update(step, {})
        raise KeyboardInterrupt


def steps_printed(out: io.StringIO) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]


def test_plain_lines_keep_their_distance_but_tell_first_and_last():
    out, clock, progress = plain(total_steps=9, interval=5.0)
    with progress:
        for step in range(1, 10):
            clock.now += 2.0
            progress.update(step, {})
    assert steps_printed(out) == [1, 4, 7, 9]


def test_plain_last_line_comes_also_after_ctrl_c():
    out, clock, progress = plain(total_steps=100, interval=50.0)
    with pytest.raises(KeyboardInterrupt):
        interrupt(progress, clock)
    assert steps_printed(out) == [1, 3]


def test_plain_without_a_step_prints_nothing():
    out, _, progress = plain(total_steps=1, interval=0.0)
    with progress:
        pass
    assert out.getvalue() == ""


def terminal(monkeypatch, width: int) -> tuple[io.StringIO, Console]:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    return out, Console(file=out, force_terminal=True, width=width)


def test_terminal_lines_fit_and_stay(monkeypatch):
    out, console = terminal(monkeypatch, width=40)
    clock = Clock()
    with Progress(console, total_steps=5, clock=clock) as progress:
        progress.update(3, {"reward/mean": 0.25, "eval/accuracy": 0.5})
        clock.now += 2.0
        progress.update(4, {"reward/mean": 0.75, "policy/entropy": 1.25})
        progress.phase("evaluating")
    lines = out.getvalue().split("\r")[-1].splitlines()
    assert "step 4/5  2.0 s/step  ETA 2.0 s  2.0 s …" in lines[0]
    assert "reward 0.75  entropy 1.25  accuracy 50.…" in lines[1]


def test_a_terminal_shows_what_the_run_is_doing(monkeypatch):
    out, console = terminal(monkeypatch, width=80)
    with Progress(console, total_steps=5, clock=Clock()) as progress:
        progress.update(1, {})
        progress.phase("evaluating 8 held-out examples")
        assert "step 1/5  0 ms elapsed  evaluating 8 held-out" in out.getvalue()
        progress.update(2, {})
    assert "evaluating" not in out.getvalue().split("\r")[-1]


def test_a_file_says_what_happens_before_the_first_step():
    out, clock, progress = plain(total_steps=3, interval=0.0)
    with progress:
        progress.phase("evaluating 8 held-out examples")
        clock.now += 60.0
        progress.update(0, {"eval/accuracy": 0.125})
        progress.phase("step 1, which compiles programs")
        clock.now += 90.0
        progress.update(1, {"reward/mean": 0.5})
        progress.phase("evaluating 8 held-out examples")
        clock.now += 2.0
        progress.update(2, {"reward/mean": 0.5})
    assert out.getvalue().splitlines() == [
        "evaluating 8 held-out examples",
        "step 0/3  accuracy 12.5% at 0",
        "step 1, which compiles programs",
        "step 1/3  reward 0.5  accuracy 12.5% at 0",
        # The pace leaves out the step that compiled.
        "step 2/3  reward 0.5  accuracy 12.5% at 0  2.0 s/step  ETA 2.0 s",
    ]


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (
            {"reward/mean": 0.5, "train/loss": 1e-9, "policy/entropy": 1.5,
             "rollout/completion_length": 12.5, "rollout/truncated_fraction": 0.25},
            "reward 0.5  entropy 1.5  length 12.5  cut 25.0%",
        ),
        ({"train/loss": 2.5, "eval/loss": 2.25}, "loss 2.5  held-out loss 2.25 at 1"),
        (
            {"train/loss": 0.625, "preference/accuracy": 0.75,
             "preference/margin": 0.125, "eval/accuracy": 0.5},
            "loss 0.625  train accuracy 75.0%  margin 0.125  accuracy 50.0% at 1",
        ),
        ({"train/loss": 3.0, "distill/divergence": 0.5}, "loss 3  divergence 0.5"),
        (
            {"train/loss": 0.5, "process/first_error_accuracy": 0.25},
            "loss 0.5  train accuracy 25.0%",
        ),
    ],
    ids=["rl", "sft", "dpo", "distillation", "process"],
)  # fmt: skip
def test_each_kind_of_run_shows_its_own_metrics(metrics, line):
    out, _, progress = plain(total_steps=2, interval=0.0)
    with progress:
        progress.update(1, metrics)
    assert out.getvalue() == f"step 1/2  {line}\n"


def test_terminal_is_clean_after_ctrl_c(monkeypatch):
    out, console = terminal(monkeypatch, width=80)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        interrupt(Progress(console, total_steps=5), Clock())
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
        assert not thread.is_alive()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().rindex(show) > out.getvalue().rindex(hide)


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with Progress(console, total_steps=5) as progress:
        progress.update(1, {})
    assert out.getvalue() == "step 1/5\n"


@pytest.mark.parametrize(
    ("total_steps", "interval", "message"),
    [
        (0, 1.0, "total_steps must be at least 1, got 0"),
        (1, -1.0, "interval must be at least 0 seconds, got -1.0"),
    ],
)
def test_progress_refuses(total_steps, interval, message):
    with pytest.raises(ValueError, match=message):
        Progress(Console(), total_steps=total_steps, interval=interval)


def test_progress_goes_forward():
    _, _, progress = plain(total_steps=5, interval=0.0)
    progress.update(2, {})
    with pytest.raises(ValueError, match="step must be greater than 2, got 2"):
        progress.update(2, {})
