"""A version whose parts are in several processes of the trainer."""

import threading

import numpy as np
import pytest

from jaxrl_post.fleet.catalogue import Catalogue
from jaxrl_post.fleet.chunks import ChunkError
from jaxrl_post.fleet.image import stage
from jaxrl_post.fleet.manifest import from_json, joined, keys_of, to_json, to_records
from tests.fleet.versions import Training, whole

HALF = 128


class Together:
    """Catalogues of processes, each with a share of the rows, that exchange entries."""

    def __init__(self, count: int) -> None:
        self.catalogues = [Catalogue(chunk_bytes=4096) for _ in range(count)]
        self._barrier = threading.Barrier(count, timeout=60)
        self._records: list = [None] * count

    def add(self, version: int, weight: np.ndarray, **options) -> list:
        """Adds a version in all processes; returns the manifest of each."""
        found: list = [None] * len(self.catalogues)

        def process(index: int) -> None:
            def join(entries):
                self._records[index] = to_records(entries)
                self._barrier.wait()
                made = joined(self._records)
                self._barrier.wait()
                return made

            rows = np.array_split(np.arange(len(weight)), len(self.catalogues))[index]
            first, last = int(rows[0]), int(rows[-1]) + 1
            part = ((first, last), (0, weight.shape[1])), weight[first:last]
            arrays = [("weight", [part])]
            if not index:
                arrays.append(("scale", whole(np.float32([2.0]))))
            if "unchanged" in options:
                arrays = arrays[:1]
            found[index] = self.catalogues[index].add(
                version, arrays, join=join, **options
            )

        threads = [
            threading.Thread(target=process, args=(index,))
            for index in range(len(self.catalogues))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def get(self, key: str, size: int) -> bytes:
        holders = [c.payload(key) for c in self.catalogues]
        # Only the process that has the part serves it.
        (data,) = [each for each in holders if each is not None]
        assert len(data) == size
        return bytes(data)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_processes_make_one_manifest(count):
    training, together = Training(rows=2 * HALF, columns=64), Together(count)
    held = None
    for version in range(4):
        weight = training.bfloat16
        options = {"unchanged": ["scale"]} if version else {}
        manifests = together.add(version, weight, **options)
        assert len({each.digest for each in manifests}) == 1
        manifest = from_json(to_json(manifests[0]))
        held = stage(manifest, together.get, held)
        np.testing.assert_array_equal(
            held.array("weight").view(np.uint16), weight.view(np.uint16)
        )
        assert held.array("scale").tolist() == [2.0]
        training.step(1e-6)
    # The later versions came as deltas, each from the process that has the part.
    assert held.traffic.delta_bytes > 0
    assert held.traffic.full_bytes == 0


def test_each_key_has_one_owner():
    together = Together(2)
    together.add(0, Training(rows=2 * HALF, columns=64).bfloat16)
    first, second = (keys_of(each) for each in together._records)
    assert first.isdisjoint(second)
    assert all(together.catalogues[1].payload(key) for key in second)
    assert not any(together.catalogues[0].payload(key) for key in second)
    assert all(together.catalogues[0].names(key) for key in first | second)
    assert not together.catalogues[0].names("none")


def test_parts_that_do_not_fit_are_refused():
    one = Catalogue().add(0, [("w", whole(np.zeros((2, 2), np.float32)))])
    records = to_records(one.arrays)
    with pytest.raises(ChunkError, match=r"parts must cover the shape \(2, 2\) once"):
        joined([records, records])
