"""Images: versions arrive to the last bit where chunks are damaged, stale or gone."""

import dataclasses
import threading
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from jaxrl_post.fleet.catalogue import Catalogue
from jaxrl_post.fleet.chunks import ChunkError, digest_of
from jaxrl_post.fleet.image import Traffic, path_of, stage
from jaxrl_post.fleet.manifest import Manifest, from_json, to_json
from tests.fleet.versions import BF16, Training, whole


class Peer:
    """Fetches from a catalogue or an image, after `damage` of (payload, attempt)."""

    def __init__(self, source, damage=lambda payload, attempt: payload):
        self.source = source
        self.damage = damage
        self.asked = Counter()
        self.order = []

    def __call__(self, key, size):
        self.asked[key] += 1
        self.order.append(key)
        payload = self.source.payload(key)
        if payload is None:
            raise ChunkError(f"{key} is not held")
        assert len(payload) == size
        return self.damage(payload, self.asked[key])


def bits(values):
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def require_equal(image, arrays):
    for path, values in arrays.items():
        got = image.array(path)
        assert (got.dtype, got.shape) == (values.dtype, values.shape)
        assert (bits(got) == bits(values)).all(), path
        assert not got.flags.writeable


def publish(catalogue, version, arrays):
    return catalogue.add(
        version, [(path, whole(values)) for path, values in arrays.items()]
    )


def two_versions(chunk_bytes=2**14, **options):
    """A catalogue with versions 0 and 1 of a bfloat16 array of 8 chunks."""
    training = Training()
    catalogue = Catalogue(chunk_bytes=chunk_bytes, **options)
    arrays = []
    for version in range(2):
        arrays.append({"w": training.bfloat16})
        publish(catalogue, version, arrays[version])
        training.step(1e-6)
    return catalogue, arrays


def test_fifty_versions_arrive_to_the_last_bit():
    trainings = {
        "slow": (Training(1), 1e-6, "bfloat16"),
        "fast": (Training(2), 1e-5, "bfloat16"),
        "int8": (Training(3), 1e-5, "int8"),
        "float32": (Training(4), 1e-6, "float32"),
    }
    odd = np.zeros(1000, BF16)
    frozen = np.arange(300, dtype=ml_dtypes.float8_e4m3fn)
    catalogue = Catalogue(chunk_bytes=2**15)
    image = None
    for version in range(50):
        # NaN of every payload, and zeros that change their sign.
        odd = odd.copy()
        odd.view(np.uint16)[version::50] = 0x7F80 + 1 + version
        odd.view(np.uint16)[version + 1 :: 50] = (version % 2) << 15
        arrays = {"odd": odd, "frozen": frozen}
        for path, (training, learning_rate, name) in trainings.items():
            arrays[path] = getattr(training, name)
            training.step(learning_rate)
        sent = to_json(publish(catalogue, version, arrays))
        image = stage(from_json(sent), Peer(catalogue), image, seed=version)
        require_equal(image, arrays)
        assert image.traffic.healed == image.traffic.retried == 0
        if version:
            # All of float32 changes, and none of the frozen array.
            assert image.traffic.full_bytes == arrays["float32"].nbytes
            assert image.traffic.reused_bytes == frozen.nbytes
            assert image.traffic.delta_bytes < 2**17
        catalogue.retire(version)


def test_an_image_counts_what_it_fetched():
    catalogue, arrays = two_versions()
    first, second = (catalogue.manifest(version) for version in range(2))
    old = stage(first, Peer(catalogue))
    assert old.traffic == Traffic(full_bytes=2**17)
    new = stage(second, Peer(catalogue), old)
    sizes = [chunk.delta.size for chunk in second.chunks()]
    assert new.traffic == Traffic(delta_bytes=sum(sizes))
    assert sum(sizes) == catalogue.last_addition.update_bytes
    # The same again costs nothing, and takes no memory either.
    again = stage(second, Peer(catalogue), new)
    assert again.traffic == Traffic(reused_bytes=2**17)
    assert np.shares_memory(again.array("w"), new.array("w"))
    require_equal(old, arrays[0])
    require_equal(new, arrays[1])


def test_a_chunk_that_occurs_twice_is_fetched_once():
    zeros = np.zeros(2**13, BF16)
    catalogue = Catalogue(chunk_bytes=2**12)
    arrays = {"a": zeros, "b": np.append(zeros, zeros[:5])}
    manifest = publish(catalogue, 0, arrays)
    peer = Peer(catalogue)
    image = stage(manifest, peer)
    require_equal(image, arrays)
    assert peer.asked == {key: 1 for key in manifest.keys}
    assert image.traffic.full_bytes == 2**12 + 10


def test_shards_are_put_together_and_whole_arrays_are_not_copied():
    values = np.arange(48, dtype=np.float32).reshape(4, 12)
    index = [((a, a + 2), (b, b + 6)) for b in (0, 6) for a in (0, 2)]
    shards = [
        (bounds, values[tuple(slice(*pair) for pair in bounds)]) for bounds in index
    ]
    catalogue = Catalogue(chunk_bytes=32)
    arrays = {
        "whole": values,
        "scalar": np.asarray(np.int8(3)),
        "none": np.zeros((0, 5), np.float16),
    }
    parts = [
        ("shards", shards),
        *((path, whole(each)) for path, each in arrays.items()),
    ]
    image = stage(catalogue.add(0, parts), Peer(catalogue))
    require_equal(image, arrays | {"shards": values})
    assert np.shares_memory(image.array("whole"), image.array("whole"))
    assert not np.shares_memory(image.array("shards"), image.array("shards"))
    with pytest.raises(KeyError, match="other"):
        image.array("other")


def test_an_image_relays_what_it_has():
    catalogue, arrays = two_versions()
    first, second = (catalogue.manifest(version) for version in range(2))
    arrived = {}
    relays = [stage(first, Peer(catalogue))]
    relays.append(
        stage(second, Peer(catalogue), relays[0], arrived=arrived.__setitem__)
    )
    assert arrived.keys() == second.keys
    for key in second.keys:
        assert digest_of(arrived[key]) == digest_of(relays[1].payload(key)) == key
        assert relays[1].payload(key).readonly
        assert arrived[key].readonly
    behind = stage(first, Peer(relays[0]))
    new = stage(second, Peer(relays[1]), behind)
    assert new.traffic == relays[1].traffic
    require_equal(new, arrays[1])
    # A sampler that began with this version has no deltas: full chunks heal.
    beginner = stage(second, Peer(catalogue))
    healed = stage(second, Peer(beginner), behind).traffic
    assert healed == Traffic(full_bytes=2**17, healed=8)


def flipped(place):
    def damage(payload, attempt):
        data = bytearray(payload)
        data[place % len(data)] ^= 0x10
        return bytes(data)

    return damage


DAMAGES = {
    "flipped": flipped(7),
    "truncated": lambda payload, attempt: payload[:-1],
    "longer": lambda payload, attempt: bytes(payload) + b"\0",
    "empty": lambda payload, attempt: b"",
    "other": lambda payload, attempt: bytes(len(payload)),
}


@pytest.mark.parametrize("pack_below", [0, 1])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_delta_is_healed_by_the_chunk(name, pack_below):
    catalogue, arrays = two_versions(pack_below=pack_below)
    first, second = (catalogue.manifest(version) for version in range(2))
    deltas = {chunk.delta.key for chunk in second.chunks()}
    old = stage(first, Peer(catalogue))
    peer = Peer(catalogue)
    peer.damage = lambda payload, attempt: (
        DAMAGES[name](payload, attempt) if digest_of(payload) in deltas else payload
    )
    new = stage(second, peer, old)
    assert new.traffic == Traffic(full_bytes=2**17, healed=8)
    require_equal(new, arrays[1])
    require_equal(old, arrays[0])
    # Damaged deltas are not relayed.
    assert all(new.payload(key) is None for key in deltas)


@pytest.mark.parametrize("pack_below", [0, 10])
def test_a_flip_of_any_byte_of_a_delta_is_noticed(pack_below):
    rng = np.random.default_rng(0)
    base = rng.normal(0, 0.02, 300).astype(BF16)
    new = base.copy()
    new[rng.choice(300, 20, replace=False)] = 1
    catalogue = Catalogue(pack_below=pack_below)
    first, second = (
        publish(catalogue, version, {"w": values})
        for version, values in enumerate((base, new))
    )
    (chunk,) = second.chunks()
    held = stage(first, Peer(catalogue))
    for place in range(chunk.delta.size):
        # As sent; and as a trainer would announce that encoded it wrongly.
        payload = flipped(place)(catalogue.payload(chunk.delta.key), 1)
        wrong = dataclasses.replace(chunk.delta, key=digest_of(payload))
        for delta in (chunk.delta, wrong):
            manifest = with_delta(second, delta)
            sent = {delta.key: payload, chunk.key: catalogue.payload(chunk.key)}
            image = stage(manifest, lambda key, size, sent=sent: sent[key], held)
            assert image.traffic == Traffic(full_bytes=600, healed=1)
            require_equal(image, {"w": new})


def with_delta(manifest, delta):
    """A manifest of one chunk with another delta."""
    (array,) = manifest.arrays
    (part,) = array.parts
    chunks = tuple(dataclasses.replace(each, delta=delta) for each in part.chunks)
    part = dataclasses.replace(part, chunks=chunks)
    array = dataclasses.replace(array, parts=(part,))
    return Manifest.of(manifest.version, [array])


def test_a_delta_to_another_base_is_refused():
    catalogue, arrays = two_versions(chunk_bytes=2**17)
    other = publish(catalogue, 2, {"w": Training(7).bfloat16})
    (chunk,) = catalogue.manifest(1).chunks()
    (held_chunk,) = other.chunks()
    wrong = dataclasses.replace(chunk.delta, base=held_chunk.key)
    held = stage(other, Peer(catalogue))
    image = stage(with_delta(catalogue.manifest(1), wrong), Peer(catalogue), held)
    assert image.traffic == Traffic(full_bytes=2**17, healed=1)
    require_equal(image, arrays[1])


def test_a_base_of_another_size_is_refused():
    catalogue, arrays = two_versions(chunk_bytes=2**17)
    small = publish(catalogue, 2, {"w": np.ones(3, BF16)})
    (chunk,) = catalogue.manifest(1).chunks()
    (held_chunk,) = small.chunks()
    wrong = dataclasses.replace(chunk.delta, base=held_chunk.key)
    held = stage(small, Peer(catalogue))
    image = stage(with_delta(catalogue.manifest(1), wrong), Peer(catalogue), held)
    assert image.traffic == Traffic(full_bytes=2**17, healed=1)
    require_equal(image, arrays[1])


def test_a_skipped_version_is_fetched_in_full():
    training = Training()
    catalogue = Catalogue()
    manifests = []
    for version in range(3):
        arrays = {"w": training.bfloat16, "frozen": np.ones(9, BF16)}
        manifests.append(publish(catalogue, version, arrays))
        training.step(1e-6)
    held = stage(manifests[0], Peer(catalogue))
    image = stage(manifests[2], Peer(catalogue), held)
    assert image.traffic == Traffic(full_bytes=2**17, reused_bytes=18)
    require_equal(image, arrays)


def test_a_chunk_that_changed_before_a_skipped_version_has_its_delta_still():
    catalogue, arrays = two_versions()
    third = publish(catalogue, 2, arrays[1] | {"new": np.ones(3, BF16)})
    held = stage(catalogue.manifest(0), Peer(catalogue))
    image = stage(third, Peer(catalogue), held)
    assert image.traffic.full_bytes == 6
    assert 0 < image.traffic.delta_bytes < 2**13
    require_equal(image, arrays[1])


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("failing", [1, 2])
def test_a_damaged_chunk_is_fetched_again(name, failing):
    catalogue, arrays = two_versions()
    manifest = catalogue.manifest(1)
    broken = next(manifest.chunks()).key
    peer = Peer(catalogue)
    peer.damage = lambda payload, attempt: (
        DAMAGES[name](payload, attempt)
        if digest_of(payload) == broken and attempt <= failing
        else payload
    )
    image = stage(manifest, peer)
    assert image.traffic == Traffic(full_bytes=2**17, retried=failing)
    assert peer.asked[broken] == failing + 1
    require_equal(image, arrays[1])


def failing_at(keys, error):
    def damage(payload, attempt):
        if digest_of(payload) in keys:
            raise error
        return payload

    return damage


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError("late"), None])
def test_a_chunk_that_never_arrives_is_named(error):
    catalogue, arrays = two_versions()
    first, second = (catalogue.manifest(version) for version in range(2))
    held = stage(first, Peer(catalogue))
    chunk = list(second.chunks())[5]
    keys = {chunk.key, chunk.delta.key}
    damage = failing_at(keys, error) if error else flipped(3)
    told = f"array 'w' .* in 3 attempts: .*{error or 'digest'}"
    threads = threading.active_count()
    with pytest.raises(ChunkError, match=told) as raised:
        stage(second, Peer(catalogue, damage), held)
    assert ("chunk 5 of" in str(raised.value)) == bool(error)
    assert threading.active_count() == threads
    require_equal(held, arrays[0])


def test_another_exception_ends_at_once_and_leaves_no_thread():
    catalogue, _ = two_versions(chunk_bytes=2**10)
    peer = Peer(catalogue)

    def get(key, size):
        if len(peer.order) == 10:
            raise RuntimeError("the run ends")
        return peer(key, size)

    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="the run ends"):
        stage(catalogue.manifest(1), get, streams=2)
    assert threading.active_count() == threads
    assert len(peer.order) < 128


def test_chunks_are_fetched_by_so_many_streams_at_once():
    catalogue, arrays = two_versions()
    meet = threading.Barrier(4, timeout=30)

    def get(key, size):
        meet.wait()
        return catalogue.payload(key)

    # 8 chunks in twos of four; with fewer threads the barrier would break.
    require_equal(stage(catalogue.manifest(1), get, streams=4), arrays[1])


def test_the_seed_orders_the_chunks():
    catalogue, _ = two_versions(chunk_bytes=2**10)
    manifest = catalogue.manifest(0)
    orders = []
    for seed in (None, 0, 0, 1):
        peer = Peer(catalogue)
        stage(manifest, peer, seed=seed, streams=1)
        orders.append(peer.order)
    keys = [chunk.key for chunk in manifest.chunks()]
    assert orders[0] == keys
    assert orders[1] == orders[2]
    assert len({tuple(each) for each in orders}) == 3
    assert all(sorted(each) == sorted(keys) for each in orders)


def test_a_size_that_is_no_chunks_is_refused_although_it_is_held():
    values = np.arange(64, dtype=np.uint8)
    catalogue = Catalogue()
    honest = publish(catalogue, 0, {"w": values})
    held = stage(honest, Peer(catalogue))
    (array,) = honest.arrays
    (part,) = array.parts
    chunk = dataclasses.replace(part.chunks[0], size=32)
    part = dataclasses.replace(part, index=((0, 32),), chunks=(chunk,))
    array = dataclasses.replace(array, shape=(32,), parts=(part,))
    lie = from_json(to_json(Manifest.of(1, [array])))
    with pytest.raises(ChunkError, match="must have 32 bytes, got 64"):
        stage(lie, lambda key, size: catalogue.payload(key), held)
    require_equal(held, {"w": values})


def manifests_of(learning_rates):
    training = Training()
    catalogue = Catalogue()
    manifests = [publish(catalogue, 0, {"w": training.bfloat16})]
    for version, learning_rate in enumerate(learning_rates, start=1):
        training.step(learning_rate)
        manifests.append(publish(catalogue, version, {"w": training.bfloat16}))
    return catalogue, manifests


def test_the_path_follows_deltas_where_they_are_fewer_bytes():
    _, manifests = manifests_of([1e-6] * 4)
    assert path_of(manifests, manifests[1]) == manifests[2:]
    assert path_of(manifests, manifests[3]) == manifests[4:]
    # The first version is not retained, but held.
    assert path_of(manifests[1:], manifests[0]) == manifests[1:]
    # Neither nothing nor a version that leads nowhere helps.
    assert path_of(manifests, None) == manifests[4:]
    assert path_of(manifests[2:], manifests[0]) == manifests[4:]
    assert path_of(manifests, manifests[4]) == manifests[4:]
    # Each of three deltas of 2e-5 is half of the version.
    _, large = manifests_of([2e-5] * 3)
    assert path_of(large, large[0]) == large[3:]
    assert path_of(large, large[1]) == large[3:]
    assert path_of(large, large[2]) == large[3:]


def test_staging_along_the_path_costs_what_it_says():
    catalogue, manifests = manifests_of([1e-6] * 3)
    image = stage(manifests[0], Peer(catalogue))
    for manifest in path_of(manifests, image.manifest):
        expected = manifest.missing_bytes(image.manifest.keys)
        image = stage(manifest, Peer(catalogue), image)
        assert image.traffic == Traffic(delta_bytes=expected)
    assert image.manifest == manifests[3]
