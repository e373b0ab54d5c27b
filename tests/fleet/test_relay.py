"""Catalogue, broker and images together: several samplers stage at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxrl_post.fleet.catalogue import Catalogue
from jaxrl_post.fleet.holders import Holders, Refer, Send, Wait
from jaxrl_post.fleet.image import Traffic, stage
from tests.fleet.versions import Training, whole


class Relay:
    """A trainer and samplers in threads, which serve what has arrived at once.

    `liar` serves other bytes to all that are referred to it.
    """

    def __init__(self, catalogue, liar=None):
        self.catalogue = catalogue
        self.liar = liar
        self.holders = Holders()
        self.changed = threading.Condition()
        self.arrived = {}
        self.sent_bytes = 0

    def sampler(self, name):
        """Returns the `get` and `arrived` of a sampler."""
        sources = {}

        def get(key, size):
            # Asked again, so the source before had other bytes.
            failed = sources.setdefault(key, set())
            with self.changed:
                while isinstance(answer := self.holders.ask(key, name, failed), Wait):
                    assert self.changed.wait(timeout=30), "nobody brought it"
                if answer == Send():
                    self.sent_bytes += size
                    return self.catalogue.payload(key)
                assert isinstance(answer, Refer)
                other = answer.members[0]
                failed.add(other)
                payload = self.arrived[other, key]
            return bytes(len(payload)) if other == self.liar else payload

        def arrived(key, payload):
            with self.changed:
                self.arrived[name, key] = payload
                self.holders.has(name, [key])
                self.changed.notify_all()

        return get, arrived

    def stage(self, manifest, images):
        """All samplers stage a version at the same time; returns their images."""

        def run(number):
            get, arrived = self.sampler(f"s{number}")
            return stage(
                manifest, get, images[number], seed=number, streams=2, arrived=arrived
            )

        with ThreadPoolExecutor(len(images)) as pool:
            return list(pool.map(run, range(len(images))))


def published():
    training = Training()
    catalogue = Catalogue(chunk_bytes=2**13)
    manifests = []
    for version in range(3):
        manifests.append(catalogue.add(version, [("w", whole(training.bfloat16))]))
        training.step(1e-6)
    return catalogue, manifests


@pytest.mark.parametrize("samplers", [1, 4, 8])
def test_twice_the_version_leaves_the_trainer(samplers):
    catalogue, manifests = published()
    relay = Relay(catalogue)
    images = [None] * samplers
    for number, manifest in enumerate(manifests):
        before = relay.sent_bytes
        images = relay.stage(manifest, images)
        size = manifests[number].missing_bytes(
            manifests[number - 1].keys if number else ()
        )
        assert relay.sent_bytes - before == min(samplers, 2) * size
        traffic = Traffic(delta_bytes=size) if number else Traffic(full_bytes=size)
        assert all(image.traffic == traffic for image in images)
        for image in images:
            assert image.array("w").tobytes() == images[0].array("w").tobytes()
    assert relay.holders.extra_sends == 0


def test_a_sampler_that_serves_other_bytes_harms_nobody():
    catalogue, manifests = published()
    relay = Relay(catalogue, liar="s0")
    images = relay.stage(manifests[0], [None] * 6)
    for image in images:
        assert image.array("w").tobytes() == images[0].array("w").tobytes()
        assert image.traffic.full_bytes == manifests[0].size
    # The trainer has sent what only the liar had.
    assert relay.sent_bytes <= 2 * manifests[0].size + relay.holders.extra_sends * 2**13
