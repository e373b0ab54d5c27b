"""The promises of the fleet, over random schedules of failures in virtual time."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from jaxrl_post.fleet.orders import PolicyVersion
from jaxrl_post.fleet.worker import OrderWorker
from jaxrl_post.sampler.requests import Request, SamplingParams
from tests.fleet.drawing import FOREIGN, HEAVY, Stubborn, length_of
from tests.fleet.network import Job, Network, Node, Trainer
from tests.tiers import daily

# Seconds during which things go wrong, and within which all must end afterwards.
CHAOS_S, CALM_S = 4.0, 120.0


class Schedule:
    """A run in which things go wrong until they do not."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.network = Network(
            draw,
            lost=draw.choice((0.0, 0.0, 0.1, 0.3)),
            repeated=draw.choice((0.0, 0.2)),
            delay_s=draw.choice((0.01, 0.2, 1.5)),
            written=seed % 20 == 0,
        )
        self.trainer = Trainer(
            self.network,
            self.jobs(),
            silence_s=draw.choice((1.5, 3.0)),
            overlap=draw.random() < 0.2,
        )
        self.nodes: list[Node] = []
        self.names = 0
        for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4))):
            self.add()
        for _ in range(draw.randrange(8)):
            act = draw.choice(ACTS)
            self.network.after(draw.random() * CHAOS_S, lambda act=act: act(self))

    def jobs(self) -> list[Job]:
        """Some jobs; versions may have the same bytes."""
        draw, jobs = self.draw, list[Job]()
        for version in range(draw.choice((1, 1, 2))):
            digest = f"d{draw.randrange(2) if version else 0}"
            prompts = draw.sample(range(8), draw.choice((1, 1, 2, 3)))
            jobs.append(
                Job(
                    PolicyVersion(version, digest),
                    [self.request(100 * version + prompt) for prompt in prompts],
                )
            )
        return jobs

    def request(self, prompt_id: int) -> Request:
        """A request of some samples."""
        draw = self.draw
        own = (FOREIGN,) if draw.random() < 0.02 else (1, 2)
        sampling = SamplingParams(
            max_tokens=draw.choice((3, 8, 20)), alternatives=draw.random() < 0.1
        )
        first = draw.choice((0, 0, 5))
        count = draw.choice((1, 2, 4, 6))
        return Request(prompt_id, own, count, first, sampling)

    def add(self, name: str | None = None, *, good: bool = False) -> Node:
        """Starts a sampler."""
        draw = self.draw
        if name is None:
            self.names += 1
            name = f"s{self.names}"
        slots = draw.choice((1, 2, 4))
        worker = OrderWorker()
        if not good and draw.random() < 0.4:
            worker = Stubborn(slots, draw.choice((0, 5)))
        refuses = frozenset[str]()
        if not good and draw.random() < 0.1:
            refuses = frozenset(("d0",))
        pace = draw.choice((10.0, 10.0, 1.0))
        node = Node(
            self.network,
            self.trainer,
            name,
            pace,
            worker,
            slots,
            refuses=refuses,
            stage_s=draw.choice((0.1, 2.0)),
        )
        self.nodes.append(node)
        return node

    @property
    def quiet(self) -> bool:
        """Whether all have nothing to do."""
        members = self.trainer.leases.members.values()
        return not (
            any(each.running or each.orders for each in members)
            or any(each.worker.busy for each in self.alive)
        )

    @property
    def alive(self) -> list[Node]:
        """The samplers whose processes run."""
        return [each for each in self.nodes if each.alive]

    def one(self) -> Node | None:
        """Any of these."""
        return self.draw.choice(self.alive) if self.alive else None

    def play(self) -> None:
        """Plays the schedule, and checks how it ends."""
        network, trainer = self.network, self.trainer
        network.run(CHAOS_S, lambda: trainer.done)
        network.lost, network.repeated, network.delay_s = 0.0, 0.0, 0.1
        trainer.leases.held = False
        self.add(good=True)
        network.run(network.now + CALM_S, lambda: trainer.done)
        assert trainer.done, f"{trainer.due} have not ended"
        network.run(network.now + 4 * trainer.silence_s, lambda: self.quiet)
        leases = trainer.leases
        assert not leases.busy
        assert self.quiet


def kill(run: Schedule) -> None:
    """A process ends, and its connection breaks, or does not."""
    if node := run.one():
        node.alive = False
        if run.draw.random() < 0.5:
            epoch = node.epoch
            run.network.after(0.05, lambda: run.trainer.lost(node.name, epoch))


def restart(run: Schedule) -> None:
    """A process ends and is started again with its name."""
    if node := run.one():
        kill(run)
        node.alive = False
        run.network.after(run.draw.random(), lambda: run.add(node.name))


def part(run: Schedule) -> None:
    """A connection breaks, and both sides live on."""
    if node := run.one():
        run.trainer.lost(node.name, node.epoch)


def away(run: Schedule) -> None:
    """Nothing of a sampler gets through for a while."""
    if node := run.one():
        node.away_until = run.network.now + run.draw.random() * 6


def cancel(run: Schedule) -> None:
    """The trainer stops some samples, or all, and may draw them again."""
    due = list(run.trainer.due)
    if due:
        chosen = run.draw.sample(due, run.draw.randint(1, len(due)))
        run.trainer.cancel(chosen, run.draw.choice(("", "anew", "on")))


def hold(run: Schedule) -> None:
    """Nothing is granted for a while."""
    run.trainer.leases.held = True

    def go_on() -> None:
        run.trainer.leases.held = False
        run.trainer.wake()

    run.network.after(run.draw.random() * 3, go_on)


def forget(run: Schedule) -> None:
    """A sampler lets a policy go that is wanted; it fetches it again."""
    node = run.one()
    if node is None or not node.worker.policies:
        return
    digest = run.draw.choice(list(node.worker.policies))
    # `OrderWorker` is never without what it samples by.
    if isinstance(node.worker, Stubborn) or digest not in node.worker.needed:
        del node.worker.policies[digest]


ACTS: tuple[Callable[[Schedule], object], ...] = (
    kill,
    restart,
    part,
    away,
    cancel,
    hold,
    forget,
    lambda run: run.add(),
    lambda run: run.trainer.start(),
)


def played(seeds: range) -> Counter[str]:
    """Plays schedules; returns how often what is to be survived has happened."""
    found = Counter[str]()
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            schedule.play()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        found += Counter(schedule.trainer.leases.counts)
        found["moves"] += sum(
            event == "move" for event, _, _ in schedule.trainer.leases.happened
        )
        found["ended"] += len(schedule.trainer.ended)
    return found


@pytest.mark.parametrize("block", daily(range(1000), set(range(10))))
def test_every_sample_ends_once_as_if_nothing_had_happened(block: int):
    found = played(range(100 * block, 100 * (block + 1)))
    # They are not empty: so much was survived, and more.
    least = {"ended": 400, "deaths": 15, "takeovers": 50, "moves": 5, "stale_news": 3}
    assert all(found[name] >= count for name, count in least.items()), found


# Runs without failures: how soon they end, and what moves.


def heavy(jobs: int, prompts: int, size: int) -> list[Job]:
    """Jobs of samples with a heavy tail of lengths, of 16 to 512 tokens."""
    sampling = SamplingParams(max_tokens=1024)
    return [
        Job(
            PolicyVersion(version, f"d{version}"),
            [
                Request(1000 * version + prompt, (HEAVY, 2), size, 0, sampling)
                for prompt in range(prompts)
            ],
        )
        for version in range(jobs)
    ]


def tokens_of(job: Job) -> list[int]:
    """The lengths of a job's samples."""
    return [
        length_of((each.prompt_id, index), job.policy.digest, 1024, True)[0]
        for each in job.requests
        for index in range(each.num_samples)
    ]


@dataclass
class Calm:
    """Samplers of given paces, in bursts of 8 tokens a second; no message is lost.

    Attributes:
        jobs: of the trainer.
        paces: of the samplers, which have joined and have every policy at once.
        slots: of each.
        seed: of the network's delays.
    """

    jobs: list[Job]
    paces: Sequence[float]
    slots: int
    seed: int = 0
    ends: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Network(random.Random(self.seed), delay_s=0.02)
        self.trainer = Trainer(self.network, list(self.jobs))
        self.nodes = [self.add(f"s{k}", pace) for k, pace in enumerate(self.paces)]

    def add(self, name: str, pace: float) -> Node:
        """Starts a sampler."""
        return Node(
            self.network,
            self.trainer,
            name,
            pace,
            OrderWorker(),
            self.slots,
            steps=8,
            stage_s=0.05,
        )

    def play(self) -> list[float]:
        """Returns how long each job takes, over what all samplers could do it in."""
        begin, count, ratios = 0.0, 0, list[float]()
        speed = 8 * self.slots * sum(self.paces)
        for job in self.jobs:
            lengths = tokens_of(job)
            count += len(lengths)
            self.network.run(1e4, lambda count=count: len(self.trainer.ended) >= count)
            end = self.trainer.times[count - 1]
            ratios.append((end - begin) / (sum(lengths) / speed))
            begin = end
        return ratios

    @property
    def homes(self) -> float:
        """Samplers that drew samples of a prompt, on average."""
        found = defaultdict[int, set[str]](set)
        for node in self.nodes:
            for grant in node.grants:
                found[grant.request.prompt_id].add(node.name)
        return sum(map(len, found.values())) / len(found)


def test_one_slow_sampler_delays_the_others_little():
    """One of four has a tenth of the speed; lengths are from 16 to 512 tokens.

    The longest sample alone takes a quarter of the time: drawing samples in their order
    in all slots of the fast ones takes 1.23 times as long as tokens over speed.
    """
    run = Calm(heavy(2, 96, 8), (10.0, 10.0, 10.0, 1.0), slots=8)
    first, second = run.play()
    assert first < 1.4
    assert second < 1.3
    # Prompts stay together, and few samples move: the slow one's last ones.
    assert run.homes < 1.1
    assert run.trainer.leases.counts["takeovers"] < 2 * 10


@pytest.mark.parametrize("seed", range(3))
def test_equal_samplers_share_work_and_take_little_from_each_other(seed: int):
    run = Calm(heavy(1, 96, 8), (10.0,) * 4, slots=16, seed=seed)
    run.play()
    drawn = [node.drawn for node in run.nodes]
    assert max(drawn) < 1.25 * min(drawn)
    assert run.homes < 1.1
    assert run.trainer.leases.counts["takeovers"] < 24


def test_a_sampler_that_joins_late_gets_what_waits_and_what_was_not_begun():
    run = Calm(heavy(1, 5, 4), (1.0,), slots=16)
    run.network.run(0.5)
    assert run.trainer.leases.members["s0"].running == 20
    late = run.add("late", 1.0)
    run.network.run(0.9)
    # The sixteen that have slots stay where they are.
    assert sum(each.request.num_samples for each in late.grants) == 4
    run.play()
    assert run.trainer.leases.counts["takeovers"] == 4


@pytest.mark.parametrize("seed", range(12))
def test_samples_move_a_few_times_at_most(seed: int):
    """Paces change without need, so that now one sampler is slow and now another."""
    draw = random.Random(seed)
    paces = [draw.choice((1.0, 4.0, 10.0)) for _ in range(draw.choice((2, 3, 4)))]
    run = Calm(heavy(2, 8, 4), paces, slots=draw.choice((2, 4, 16)), seed=seed)

    def change() -> None:
        draw.choice(run.nodes).pace = draw.choice((0.5, 4.0, 10.0))
        run.network.after(3.0, change)

    run.network.after(3.0, change)
    run.play()
    samples = sum(len(tokens_of(job)) for job in run.jobs)
    # `check_whole` bounds the moves of each.
    assert run.trainer.leases.counts["takeovers"] < 1.5 * samples


# No deadlocks.


def small(count: int = 6, policy: PolicyVersion = PolicyVersion(0, "d0")) -> Job:  # noqa: B008
    return Job(policy, [Request(1, (1, 2), count)])


def test_work_waits_for_the_first_sampler_that_can_do_it():
    run = Calm([small()], (), slots=2)
    run.network.run(50.0)
    assert not run.trainer.ended
    for name in ("a", "b"):
        run.add(name, 10.0).refuses = frozenset(("d0",))
    run.network.run(100.0)
    assert not run.trainer.ended
    assert len(run.trainer.leases.members) == 2
    run.add("good", 10.0)
    run.network.run(110.0, lambda: run.trainer.done)
    assert run.trainer.done


def test_a_sampler_that_serves_no_more_gives_back_what_it_has():
    """It holds the samples of a policy that it has lost; others are ready for it."""
    run = Calm([small(40)], (1.0, 1.0), slots=4)
    run.network.run(1.5)
    node = run.nodes[0]
    node.worker.reset()
    node.worker.policies.clear()
    node.refuses, node._changed = frozenset(("d0",)), True
    # As a process that has failed and started again does.
    run.trainer.lost(node.name, node.epoch)
    run.network.run(60.0, lambda: run.trainer.done)
    assert run.trainer.done
