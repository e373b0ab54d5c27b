"""Sampling while training, with simulated device work, against schedules by hand.

    python -m benchmarks.apart --json benchmarks/results/apart_simulated.json

An update and a burst of decoding are sleeps (`benchmarks.simulated`); everything else
is the code of a run with `--samplers any:N`, over loopback HTTP. So the times show what
that code adds to the work of devices. They say nothing of devices.

With T(t) the seconds of sampling batch t, the longest sample's number of bursts times
the seconds of a burst, U the seconds of an update and P of the probe, the schedule by
hand is

    in turns          train(t) = train(t - 1) + T(t) + U
    ahead k   sampled(t) = max(sampled(t - 1), train(max(1, t - k) - 1)) + P + T(t)
              train(t)   = max(train(t - 1), sampled(t)) + U

where train(t) and sampled(t) are when step t and batch t end, and P counts for the
first batch of each version. Publishing takes no time in it. "in turns" has one pool of
devices that samples and trains, so that one of two equal pools would idle.

The pause of a switch is the time between the last burst of any sampler of a version and
a sampler's first burst by the next one, without the bursts of the probe; the next
version is published long before. By hand it is 0.
"""

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, write
from benchmarks.simulated import (
    MOST_TOKENS,
    PROBE_TOKENS,
    PROMPT,
    Burst,
    Device,
    Length,
    Simulated,
    Speed,
    State,
    Updater,
    opened,
    parameters,
)
from jaxrl_post.learner.model import versions
from jaxrl_post.rollout.ahead import Ahead, SampledBatch, Versioned
from jaxrl_post.rollout.fleet import Fleet
from jaxrl_post.sampler import Completion, Request, SamplingParams
from jaxrl_post.sampler.requests import SampleId

SAMPLES_PER_PROMPT = 4


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        name: for the table.
        ahead: as `--rollout.ahead`; None for sampling and training in turns.
        steps: of the run; the first `ahead` + 2 and the last `ahead` + 1 are not
            measured.
        update_s: seconds of an update.
        prompts: of a step.
        length: of a sample.
        speeds: of the samplers.
        hub: whether they follow over HTTP; else they are one `rollout.fleet.Fleet` of
            the trainer's process, which gives all the same number of prompts.
        spare: as `--rollout.partial`: prompts that are begun in excess, and continue by
            the next version if other prompts end before them.
    """

    name: str
    ahead: int | None
    steps: int
    update_s: float
    prompts: int
    length: Length
    speeds: tuple[Speed, ...]
    hub: bool = True
    spare: int = 0

    @property
    def first(self) -> int:
        """The first step that is measured."""
        return (self.ahead or 0) + 3

    @property
    def last(self) -> int:
        """The last step that is measured, while batches of later ones are sampled."""
        return self.steps - (self.ahead or 0) - 1

    def sampling_s(self, step: int) -> float:
        """Seconds of sampling a batch whose samples all begin at once.

        A slow sampler draws its part where nothing is moved, and none otherwise.
        """
        choose = min if self.hub else max
        speed = choose(self.speeds, key=lambda each: each.burst_s)
        prompts = range((step - 1) * self.prompts, step * self.prompts)
        longest = max(
            self.length((prompt, index))
            for prompt in prompts
            for index in range(SAMPLES_PER_PROMPT)
        )
        return math.ceil(longest / speed.tokens) * speed.burst_s

    @property
    def probe_s(self) -> float:
        """Seconds of the probe."""
        speed = self.speeds[0]
        return math.ceil(PROBE_TOKENS / speed.tokens) * speed.burst_s


@dataclass(frozen=True)
class Times:
    """Seconds a step, and the shares of them in which each side did not work."""

    step_s: float
    trainer_idle: float
    samplers_idle: float


@dataclass
class Result:
    """A case, measured and by hand.

    Attributes:
        name: of the case.
        measured: the idle share of the samplers is of their devices, tails included.
        by_hand: the same of the schedule; None where none was computed.
        metrics: means of `idle/*` and `time/publish` as a run logs them.
    """

    name: str
    measured: Times
    by_hand: Times | None
    metrics: dict[str, float] = field(default_factory=dict)


def by_hand(case: Case) -> Times:
    """Returns the times of the schedule in this module's docstring."""
    ahead, trained, sampled = case.ahead, [0.0], [0.0]
    spans = list[tuple[float, float]]()
    for step in range(1, case.steps + 1):
        version = step - 1 if ahead is None else max(1, step - ahead) - 1
        new = case.hub and (step == 1 or version > 0)
        begin = max(sampled[-1], trained[version])
        sampled.append(begin + case.sampling_s(step) + (case.probe_s if new else 0.0))
        trained.append(max(trained[-1], sampled[-1]) + case.update_s)
        spans.append((begin, sampled[-1]))
    begin, end = trained[case.first - 1], trained[case.last]
    return _times(case, begin, end, _overlap(spans, begin, end))


def _times(case: Case, begin: float, end: float, sampling: float) -> Times:
    count, whole = case.last - case.first + 1, end - begin
    trainer_idle = 1 - count * case.update_s / whole
    return Times(whole / count, trainer_idle, 1 - sampling / whole)


def _overlap(spans: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans)


@dataclass
class Sampling:
    """Samples batches, and checks that every sample is whole and none is lost.

    Attributes:
        case: whose batches.
    """

    case: Case
    # The tokens of the samples that are not whole, by prompt and index.
    _open: dict[int, dict[int, int]] = field(default_factory=dict, init=False)
    _drawn: int = field(default=0, init=False)

    def __call__(self, sampler: Any, number: int) -> SampledBatch:
        """Samples the batch of a step."""
        del number
        case, count = self.case, 0
        sampler.renew()
        for prompt, parts in self._open.items():
            for index, tokens in parts.items():
                sampler.submit(_request(prompt).rest(index, [1] * tokens))
        while len(self._open) < case.prompts + case.spare:
            sampler.submit(_request(self._drawn))
            self._open[self._drawn] = dict.fromkeys(range(SAMPLES_PER_PROMPT), 0)
            self._drawn += 1
        while count < case.prompts:
            sampler.dispatch()
            for each in sampler.collect():
                count += self._ended(each, sampler.version)
        for each in sampler.cancel():
            if each.prompt_id in self._open:
                self._ended(each, sampler.version)
        return SampledBatch([], {})

    def _ended(self, each: Completion, version: int) -> bool:
        """Counts the tokens of a sample; returns whether its prompt is whole."""
        prompt, index = each.prompt_id, each.sample_index
        assert (each.tokens.versions == version).all(), "one version samples them"
        parts = self._open[prompt]
        parts[index] += len(each.tokens)
        if each.finish_reason == "cancelled":
            return False
        assert parts.pop(index) == self.case.length((prompt, index))
        if not parts:
            del self._open[prompt]
        return not parts


def _request(prompt: int) -> Request:
    sampling = SamplingParams(max_tokens=MOST_TOKENS)
    return Request(prompt, PROMPT, num_samples=SAMPLES_PER_PROMPT, sampling=sampling)


def measured(case: Case) -> tuple[Result, list[Device]]:
    """Runs a case."""
    updater = Updater(State(parameters(2**16)), case.update_s)
    with _samplers(case, updater) as (publish, metrics_of, devices):
        beside = case.ahead is not None
        ahead = Ahead(Sampling(case), case.ahead or 0, case.steps, beside)
        ends, logged = [time.perf_counter()], list[dict[str, float]]()
        for step in range(1, case.steps + 1):
            sampler = publish()
            metrics = ahead.feed(None, sampler, step)
            ahead.take()
            updater.update()
            ends.append(time.perf_counter())
            logged.append(metrics | metrics_of())
        ahead.close()
    begin, end = ends[case.first - 1], ends[case.last]
    decoding = statistics.fmean(
        _overlap([(burst.begin, burst.end) for burst in device.bursts], begin, end)
        for device in devices
    )
    rows = logged[case.first - 1 : case.last]
    means = {
        name: statistics.fmean(row[name] for row in rows)
        for name in ("idle/trainer", "idle/samplers", "time/publish")
        if name in rows[0]
    }
    counts = {k: v for k, v in rows[-1].items() if k.startswith("fleet/")}
    times = _times(case, begin, end, decoding)
    hand = None if case.spare else by_hand(case)
    return Result(case.name, times, hand, means | counts), devices


@contextlib.contextmanager
def _samplers(
    case: Case, updater: Updater
) -> Iterator[
    tuple[Callable[[], Versioned], Callable[[], dict[str, float]], list[Device]]
]:
    """Yields what publishes a version, what measures that, and the engines."""
    if case.hub:
        with opened(updater, case.speeds, case.length) as (remote, devices):
            yield remote.publish, remote.metrics, devices
        return
    devices = [Device(speed, case.length) for speed in case.speeds]

    def publish() -> Any:
        bound: Sequence[Any] = [Simulated(each, updater.state.step) for each in devices]
        return Fleet(bound, threading.Event())

    yield publish, dict, devices


def pauses(devices: Sequence[Device]) -> list[float]:
    """Seconds of each switch of each sampler, by the docstring of this module."""
    found = list[float]()
    ends = dict[int, float]()
    for burst in (burst for device in devices for burst in device.bursts):
        if not burst.probe:
            ends[burst.version] = max(ends.get(burst.version, 0.0), burst.end)
    # All that follows the first version is compiled then.
    first = min(ends)
    for device in devices:
        for before, after in _switches(device.bursts):
            if before == first:
                continue
            probed = sum(
                burst.end - max(burst.begin, ends[before])
                for burst in device.bursts
                if burst.probe and ends[before] < burst.end <= after.begin
            )
            found.append(after.begin - ends[before] - probed)
    return found


def _switches(bursts: Sequence[Burst]) -> Iterator[tuple[int, Burst]]:
    """Yields a version and the first burst by another one that comes after it."""
    version = None
    for burst in bursts:
        if burst.probe:
            continue
        if version is not None and burst.version != version:
            yield version, burst
        version = burst.version


def constant(tokens: int) -> Length:
    """Returns lengths that are all the same."""
    return lambda sample: tokens


def one_in(many: int, tokens: int, longer: int) -> Length:
    """Returns lengths, one in many of them so many times as long."""

    def length(sample: SampleId) -> int:
        drawn = np.random.default_rng((0, *sample)).integers(many)
        return tokens * (longer if drawn == 0 else 1)

    return length


def log_normal(median: int, sigma: float, most: int) -> Length:
    """Returns lengths with a long tail."""

    def length(sample: SampleId) -> int:
        drawn = np.random.default_rng((1, *sample)).normal(0.0, sigma)
        return max(1, min(most, int(median * math.exp(drawn))))

    return length


# Two samplers of 16 slots; 8 prompts of 4 samples fill them.
PAIR = (Speed(), Speed())
PROMPTS = 8


def equal_pools(steps: int) -> list[Case]:
    """(a) Constant lengths; sampling a batch takes as long as an update."""
    length = constant(512)
    return [
        Case(name, ahead, steps, 1.28, PROMPTS, length, PAIR, hub)
        for name, ahead, hub in WAYS
    ]


WAYS = (
    ("in turns", None, False),
    ("ahead 0", 0, True),
    ("ahead 1", 1, True),
    ("ahead 3", 3, True),
)


def tails(steps: int) -> list[Case]:
    """(b) Heavy tails; an update takes as long as sampling in the mean."""
    cases = list[Case]()
    for kind, length in (
        ("1 in 50 ten times as long", one_in(50, 96, 10)),
        ("log-normal, sigma 1", log_normal(160, 1.0, 2048)),
    ):
        base = Case(kind, None, steps, 0.0, PROMPTS, length, PAIR, hub=False)
        mean = statistics.fmean(base.sampling_s(step) for step in range(1, steps + 1))
        base = replace(base, update_s=mean)
        cases += [
            replace(base, name=f"{kind}, {name}", ahead=ahead, hub=hub)
            for name, ahead, hub in WAYS
            if ahead != 0
        ]
        cases.append(
            replace(
                base, name=f"{kind}, partial", ahead=1, hub=True, spare=PROMPTS // 2
            )
        )
    return cases


def stragglers(steps: int) -> list[Case]:
    """(c) One of four samplers has a tenth of the speed of the others."""
    fast = Speed(slots=16, burst_s=0.04)
    speeds = (fast, fast, fast, replace(fast, burst_s=10 * fast.burst_s))
    base = Case("", 1, steps, 0.4, PROMPTS, constant(320), speeds)
    return [
        replace(base, name="four fast ones", speeds=(fast,) * 4),
        replace(base, name="one slow, equal parts, nothing is moved", hub=False),
        replace(base, name="one slow, parts by speed, samples are moved"),
    ]


def switches(steps: int) -> list[Case]:
    """(d) An update takes half as long as sampling, so that versions wait."""
    return [
        Case("equal lengths", 1, steps, 0.64, PROMPTS, constant(512), PAIR),
        Case("others", 1, steps, 0.64, PROMPTS, log_normal(400, 0.3, 900), PAIR),
    ]


@dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        parts: to run, of a to d.
        steps: of each run.
        json: file to write the result to.
    """

    parts: str = "abcd"
    steps: int = 16
    json: Path | None = None


CASES: dict[str, Callable[[int], list[Case]]] = {
    "a": equal_pools,
    "b": tails,
    "c": stragglers,
    "d": switches,
}


def main(options: Options) -> None:
    """Runs the benchmark."""
    console = Console()
    console.print("Updates and bursts of decoding are sleeps; all else is real.")
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "load_before": os.getloadavg(),
        "versions": versions(),
        "simulated": "updates and bursts of decoding are sleeps",
    }
    for part, cases in CASES.items():
        if part in options.parts:
            runs = [measured(case) for case in cases(options.steps)]
            console.print(_table(cases.__doc__ or part, [run for run, _ in runs]))
            found[part] = [asdict(run) for run, _ in runs]
            if part == "d":
                found["pauses"] = [
                    _pauses(console, run.name, devices) for run, devices in runs
                ]
    found["load_after"] = os.getloadavg()
    write(found, options.json)


def _table(title: str, results: Sequence[Result]) -> Table:
    table = Table("case", "s/step", "by hand", "trainer idle", "samplers idle", "moved")
    table.title = title
    for each in results:
        hand = each.by_hand
        table.add_row(
            each.name,
            f"{each.measured.step_s:.3f}",
            f"{hand.step_s:.3f}" if hand else "",
            _both(each.measured.trainer_idle, hand and hand.trainer_idle),
            _both(each.measured.samplers_idle, hand and hand.samplers_idle),
            f"{each.metrics.get('fleet/takeovers', 0):.0f}",
        )
    return table


def _both(measured: float, hand: float | None) -> str:
    return f"{measured:.1%}" + ("" if hand is None else f" ({abs(hand):.1%})")


def _pauses(
    console: Console, name: str, devices: Sequence[Device]
) -> dict[str, str | float]:
    burst_s = devices[0].speed.burst_s
    found = sorted(each / burst_s for each in pauses(devices))
    shares = {
        "median": statistics.median(found),
        "nine_in_ten": found[int(0.9 * len(found))],
        "longest": found[-1],
    }
    told = ", ".join(f"{key} {value:.2f}" for key, value in shares.items())
    console.print(f"pause of {len(found)} switches, {name}, in bursts: {told}")
    return {"name": name, "burst_s": burst_s, "switches": len(found), **shares}


if __name__ == "__main__":
    main(tyro.cli(Options))
