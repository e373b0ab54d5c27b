"""The protocol over real sockets: hub, samplers and the way between them."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from jaxrl_post.sampler import Completion, Request, SamplingParams
from tests.e2e.fleets import free_port
from tests.e2e.gates import Gates, Seen
from tests.fleet.sockets import Sampler, Trainer, alone, same

# Some threads of one process may not be silent for half a second: the machine must not
# be busy. `test_network.py`, `test_hub.py` and `test_gone.py` guard the same.
pytestmark = pytest.mark.all

SAMPLING = SamplingParams(max_tokens=12, stop_ids=(3,))
SILENCE_S = 0.5


def requests(version: int, count: int = 3) -> list[Request]:
    return [
        Request(10 * version + prompt, (prompt + 5, 7, 9), 4, sampling=SAMPLING)
        for prompt in range(count)
    ]


def assert_equal(found: list[Completion], version: int, seed: int) -> None:
    expected = alone(version, seed, requests(version))
    assert len(found) == len(expected)
    assert all(map(same, found, expected))


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_samples_are_those_of_one_engine():
    trainer = Trainer(free_port())
    sampler = Sampler("s0", trainer.url)
    try:
        for version in range(3):
            samplers = trainer.publish(version, version)
            found = trainer.sample(samplers, requests(version))
            assert_equal(found, version, version)
    finally:
        trainer.close("the run is complete")
        sampler.close()
    assert sampler.error is None
    assert sampler.follower.ended == "the run is complete"


def test_a_trainer_that_resumes_finds_samplers_that_have_its_version():
    """They let it go while the trainer had published none."""
    port = free_port()
    trainer, gates = Trainer(port), Gates(port)
    sampler = Sampler("s0", gates.url("s0"))
    try:
        trainer.sample(trainer.publish(4, 0), requests(4))
        gates.cut()
        trainer.close()
        trainer = Trainer(port)
        wait_for(lambda: "s0" in trainer.hub.leases.members)
        wait_for(lambda: not sampler.follower.state()["versions_ready"])
        assert_equal(trainer.sample(trainer.publish(4, 0), requests(4)), 4, 0)
    finally:
        trainer.close("the run is complete")
        sampler.close()
        gates.close()


def test_a_sampler_that_joins_as_the_run_ends_ends_well():
    trainer = Trainer(free_port())
    trainer.hub.ended = "the run is complete"
    sampler = Sampler("s0", trainer.url)
    try:
        wait_for(lambda: sampler.follower.ended == "the run is complete")
    finally:
        sampler.close()
        trainer.close()
    assert sampler.error is None


class DiedError(Exception):
    """The trainer dies."""


class Chaos:
    """A run in which things go wrong, a few in every version."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.port = free_port()
        self.gates = Gates(self.port, self.observe)
        self.trainer = Trainer(self.port, silence_s=SILENCE_S)
        self.samplers = dict[str, Sampler]()
        self.ended = list[Sampler]()
        self.lost = 0
        self.messages, self.next = 0, 0
        self.made = list[str]()
        for _ in range(self.draw.choice((1, 2, 3))):
            self.joins()

    async def observe(self, seen: Seen, raw: bytes) -> bytes | None:
        self.messages += 1
        if self.lost and seen.path != "/fleet/orders":
            self.lost -= 1
            return None
        return raw

    # Faults of processes and connections.

    def joins(self) -> None:
        name = f"s{len(self.samplers) + len(self.ended)}"
        self.samplers[name] = Sampler(name, self.gates.url(name))

    def dies(self) -> None:
        name = self.draw.choice([*self.samplers])
        self.gates.shut_out(name)
        self.ended.append(self.samplers.pop(name))
        self.ended[-1].stop()
        self.joins()

    def leaves(self) -> None:
        name = self.draw.choice([*self.samplers])
        self.ended.append(self.samplers.pop(name))
        self.ended[-1].stop()
        self.joins()

    def is_cut_off(self) -> None:
        name = self.draw.choice([*self.samplers])
        self.gates.shut_out(name)
        wait = self.draw.choice((0.1, 2 * SILENCE_S))
        threading.Timer(wait, self.gates.let_in, [name]).start()

    def loses_messages(self) -> None:
        self.lost = self.draw.choice((1, 3))

    def trainer_dies(self) -> None:
        raise DiedError

    def meanwhile(self) -> None:
        """Something goes wrong after some messages."""
        if self.messages < self.next or len(self.made) >= self.most:
            return
        act = self.draw.choice(
            [
                self.dies, self.leaves, self.is_cut_off, self.loses_messages,
                self.trainer_dies,
            ]
        )  # fmt: skip
        self.made.append(act.__name__)
        self.next = self.messages + self.draw.randrange(30)
        act()

    def run(self) -> None:
        for version in range(3):
            # Versions may have the same bytes.
            seed = self.draw.choice((0, version))
            self.most = len(self.made) + 3
            while True:
                try:
                    samplers = self.trainer.publish(version, seed)
                    work = requests(version)
                    found = self.trainer.sample(samplers, work, self.meanwhile)
                except DiedError:
                    self.gates.cut()
                    self.trainer.close()
                    self.trainer = Trainer(self.port, silence_s=SILENCE_S)
                    continue
                break
            assert_equal(found, version, seed)

    def close(self) -> None:
        self.trainer.close("the run is complete")
        for each in (*self.samplers.values(), *self.ended):
            each.close()
        self.gates.close()


@pytest.mark.parametrize("seed", range(50))
def test_chaos(seed):
    chaos = Chaos(seed)
    try:
        chaos.run()
    finally:
        chaos.close()
    assert [each.error for each in chaos.samplers.values() if each.error] == []
