"""What the fleet promises, over random schedules of failures in virtual time."""

import random
from collections.abc import Callable

import pytest

from jaxrl_post.fleet.leases import Policy
from jaxrl_post.fleet.worker import Worker
from jaxrl_post.sampler.requests import Request, SamplingParams
from tests.fleet.drawing import FOREIGN, Stubborn
from tests.fleet.network import Job, Network, Node, Trainer

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
                    Policy(version, digest),
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
        worker = Worker()
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
        """Whether nobody has anything to do."""
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


ACTS: tuple[Callable[[Schedule], object], ...] = (
    kill,
    restart,
    part,
    away,
    cancel,
    hold,
    lambda run: run.add(),
    lambda run: run.trainer.start(),
)


def plays(seeds: range) -> None:
    for seed in seeds:
        try:
            Schedule(seed).play()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize("block", range(4))
def test_every_sample_ends_once_as_if_nothing_had_happened(block: int):
    plays(range(500 * block, 500 * (block + 1)))
