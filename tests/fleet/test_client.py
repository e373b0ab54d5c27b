"""A sampler's connections: where the trainer is, and who sends the parameters."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.fleet import client
from jaxrl_post.fleet.app import hub_app, relay_app
from jaxrl_post.fleet.chunks import ChunkError, digest_of
from jaxrl_post.fleet.client import AwayError, TrainerClient
from jaxrl_post.fleet.holders import Holders
from jaxrl_post.fleet.hub import Hub
from jaxrl_post.fleet.image import Image, stage
from jaxrl_post.fleet.ledger import member_of
from jaxrl_post.fleet.manifest import Manifest
from jaxrl_post.programs.apart.address import trainer_url
from jaxrl_post.records.directory import RunDirectory
from jaxrl_post.serve.threads import serving

VALUES = np.random.default_rng(0).normal(size=(6, 50_000)).astype(np.float32)
DATA = VALUES[0].tobytes()
KEY = digest_of(DATA)


def published(hub: Hub) -> Manifest:
    """A version of six chunks."""
    arrays = [
        (f"w{number}", [(((0, len(row)),), row)]) for number, row in enumerate(VALUES)
    ]
    return hub.catalogue.add(0, arrays)


@contextlib.contextmanager
def hub_at(port: int = 0, **options) -> Iterator[tuple[Hub, str]]:
    hub = Hub(b"", lambda facts: "", **options)
    with serving(hub_app(hub, None), "127.0.0.1", port, name="hub") as (url, _):
        yield hub, url


@contextlib.contextmanager
def connected(url: str) -> Iterator[TrainerClient]:
    with contextlib.closing(TrainerClient(lambda: url)) as found:
        yield found


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_trainer_sends_a_version_twice_at_most(count):
    """The others fetch it from the samplers that have it, while these fetch."""

    def sample(number: int) -> Image:
        arrived = dict[str, memoryview]()
        with (
            serving(
                relay_app(arrived.get, dict, None), "127.0.0.1", 0, name=f"s{number}"
            ) as (own, _),
            connected(url) as trainer,
        ):
            epoch = trainer.join({"name": f"s{number}", "url": own, "slots": 1})
            member = member_of(f"s{number}", epoch)
            image = stage(
                manifest,
                lambda key, size: trainer.payload(member, key, size),
                seed=number,
                arrived=arrived.__setitem__,
            )
            trainer.flush(member)
            # It passes on until all have everything.
            done.wait(60)
            return image

    done = threading.Barrier(count)
    with hub_at(silence_s=60.0) as (hub, url), ThreadPoolExecutor(count) as pool:
        manifest = published(hub)
        images = list(pool.map(sample, range(count)))
        assert hub.sent_bytes == min(count, 2) * VALUES.nbytes
    for image in images:
        for number, row in enumerate(VALUES):
            np.testing.assert_array_equal(image.array(f"w{number}"), row)


@pytest.mark.parametrize("sent", [b"", DATA[:-4], DATA + b"more", bytes(len(DATA))])
def test_a_sampler_that_sends_other_bytes_is_passed_over(sent):
    with (
        hub_at(holders=Holders(copies=1)) as (hub, url),
        serving(
            relay_app(lambda key: sent, dict, None), "127.0.0.1", 0, name="liar"
        ) as (liar, _),
        connected(url) as trainer,
    ):
        published(hub)
        epoch = trainer.join({"name": "liar", "url": liar, "slots": 1})
        first = member_of("liar", epoch)
        assert trainer.payload(first, KEY, len(DATA)) == DATA
        trainer.flush(first)
        assert trainer.payload("other/2", KEY, len(DATA)) == DATA
        assert hub.sent_bytes == 2 * len(DATA)


def test_a_holder_without_an_address_is_passed_over():
    with hub_at(holders=Holders(copies=1)) as (hub, url), connected(url) as trainer:
        published(hub)
        epoch = trainer.join({"name": "gone", "url": "", "slots": 1})
        first = member_of("gone", epoch)
        assert trainer.payload(first, KEY, len(DATA)) == DATA
        trainer.flush(first)
        assert trainer.payload("other/2", KEY, len(DATA)) == DATA


def test_a_payload_that_is_being_fetched_is_waited_for():
    held = dict[str, bytes]()
    app = relay_app(held.get, dict, None, expected=lambda key: key == KEY)
    with (
        serving(app, "127.0.0.1", 0, name="process 0") as (url, _),
        connected(url) as first,
    ):
        timer = threading.Timer(0.3, held.__setitem__, (KEY, DATA))
        timer.start()
        begin = time.monotonic()
        assert first.payload("", KEY, len(DATA)) == DATA
        assert time.monotonic() - begin > 0.25
        timer.join()
        with pytest.raises(ChunkError, match="this payload is not here"):
            first.payload("", "another", 4)


def test_a_payload_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(client, "HOLDER_S", 0.2)
    app = relay_app(lambda key: None, dict, None, expected=lambda key: True)
    with (
        serving(app, "127.0.0.1", 0, name="process 0") as (url, _),
        connected(url) as first,
        pytest.raises(ChunkError, match="nothing has sent it"),
    ):
        first.payload("", KEY, len(DATA))


def test_other_processes_of_a_sampler_read_the_manifest_of_process_0():
    hub = Hub(b"", lambda facts: "")
    made = published(hub)
    versions = {made.digest: made}
    app = relay_app(lambda key: None, dict, None, manifest_of=versions.get)
    with (
        serving(app, "127.0.0.1", 0, name="process 0") as (url, _),
        connected(url) as first,
    ):
        assert first.manifest(made.digest) == made
        with pytest.raises(ChunkError, match="this version is not here"):
            first.manifest("0" * 32)


def test_a_trainer_that_starts_again_elsewhere_is_found_by_its_run(tmp_path):
    address = RunDirectory(tmp_path).address
    trainer = TrainerClient(lambda: trainer_url(str(tmp_path)))
    with contextlib.closing(trainer):
        with pytest.raises(AwayError, match=r"no trainer has written .*address.txt"):
            trainer.join({"name": "s0", "url": "", "slots": 1})
        for name in ("s0", "s1"):
            with hub_at() as (hub, url):
                address.write_text(f"{url}\n")
                trainer.join({"name": name, "url": "", "slots": 1})
                assert (trainer.url, [*hub.leases.members]) == (url, [name])
            with pytest.raises(AwayError, match="does not answer"):
                trainer.welcome()


@pytest.mark.parametrize(
    ("follow", "url"),
    [
        ("http://10.0.0.1:7777/", "http://10.0.0.1:7777"),
        ("https://trainer.local", "https://trainer.local"),
    ],
)
def test_an_address_is_taken_as_it_is(follow, url):
    assert trainer_url(follow) == url


def test_the_directory_need_not_be_there():
    with pytest.raises(ConnectionError, match="no trainer has written"):
        trainer_url(str(Path("missing") / "run"))
