"""Run twice: loads the toy checkpoint onto a mesh of two processes and reports bytes.

Arguments: the coordinator's port on loopback, the checkpoint, this process's number.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from jaxrl_post.pretrained.name_map import paths
from jaxrl_post.pretrained.param_files import load_parameter
from jaxrl_post.pretrained.tensor_files import open_tensors
from jaxrl_post.sharding import create_mesh
from tests.pretrained import toy

SPECS = toy.specs()


def counted(name, tensor, fetched):
    def fetch(region):
        values = tensor.fetch(region)
        fetched[name] = fetched.get(name, 0) + values.nbytes
        return values

    return replace(tensor, fetch=fetch)


def main(port, directory, number):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, int(number), initialization_timeout=300
    )
    shardings = toy.shardings_of(SPECS, create_mesh("ep2,tp2"))
    arrays, fetched = paths(toy.values(SPECS)), {}
    held = expected = 0
    with open_tensors(Path(directory)) as tensors:
        watched = {n: counted(n, t, fetched) for n, t in tensors.items()}
        for path, entries in toy.by_path(SPECS).items():
            value = load_parameter(watched, entries, shardings[path], np.dtype("f4"))
            for shard in value.addressable_shards:
                own = arrays[path][shard.index]
                held += np.array_equal(shard.data, own) * own.nbytes
                expected += own.nbytes
        sizes = {n: int(np.prod(t.shape)) * 4 for n, t in tensors.items()}
    report = {"held": int(held), "expected": expected, "fetched": fetched}
    print(json.dumps({**report, "sizes": sizes}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
