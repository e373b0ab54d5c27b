"""Cycles of the compiler's schedule for a tile of the kernels for TPUs.

    PYTHONPATH=build/kernels/tpu python -m benchmarks.rooflines.schedules [SHAPE ...]

libtpu, which `make check-kernels` installs there, writes the bundles of instructions of
a compiled kernel, one a cycle, with what each unit does in them. So the vector unit and
spilled registers are counted, which the rooflines leave out. Waiting for HBM is not: it
is another bound. The table is in docs/explanation/kernels.md, for a v5p; a v5e has the
same core at another clock.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["longest_part", "main"]

# FLOPs of a cycle: four matrix units of 128 x 128.
PEAK = 4 * 128 * 128 * 2
TOPOLOGY = "v5p:2x2x1"
# The kernels of an operation, by what they compute.
KERNELS = {
    "attention": ("forward", "query", "key"),
    "token_logprob": ("forward", "hidden", "weight"),
}


def main(names: list[str]) -> None:
    """Prints a table: cycles, and the share that the tile's products take at the peak.

    Args:
        names: of shapes; all without one.
    """
    with tempfile.TemporaryDirectory() as written:
        # libtpu reads it once, when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={written} "
            "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
        )
        for operation, kernels in KERNELS.items():
            heads = (f"{operation} {kernel}" for kernel in kernels)
            print(f"| shape | {' | '.join(heads)} |\n{4 * '|---'}|")
            for name, program, arrays, flops in _programs(operation):
                if names and name not in names:
                    continue
                _compile(Path(written), program, arrays)
                cells = [name]
                for kernel, of_tile in zip(kernels, flops, strict=True):
                    cycles = longest_part(Path(written), f"{operation}_{kernel}")
                    share = min(1.0, of_tile / PEAK / cycles)
                    cells += [f"{cycles:,} ({share:.0%})"]
                print(f"| {' | '.join(cells)} |", flush=True)
            print()


def longest_part(folder: Path, kernel: str) -> int:
    """Bundles of a kernel's longest part without a branch: what it does for a tile.

    Args:
        folder: where libtpu wrote one program.
        kernel: a part of the kernel's name.

    Raises:
        RuntimeError: `folder` has no schedule of this kernel.
    """
    units = sorted(folder.glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization*"))
    texts = sorted(folder.glob(f"*{kernel}*[0-9]-final_bundles.txt"))
    if len(units) != 1 or len(texts) != 1:
        raise RuntimeError(
            f"one schedule of {kernel!r} is needed in {folder}; got {len(units)} and "
            f"{len(texts)} files. libtpu writes them if LIBTPU_INIT_ARGS says so "
            "before it is loaded"
        )
    bundles = sum(line[:1].isdigit() for line in units[0].read_text().splitlines())
    # Where a loop or a branch begins, or ends.
    edges = re.findall(r"(?m)^ *(0x[0-9a-f]+) +(?:LB|PF|PB|LH)\b", texts[0].read_text())
    sizes = np.diff([0, *(int(edge, 16) for edge in edges), bundles])
    # If two have about the same length, take the first, which masks nothing.
    return int(sizes[sizes > 0.6 * sizes.max()][0])


type _Program = tuple[str, Callable[..., Any], list[tuple[Any, Any]], list[float]]


def _programs(operation: str) -> Iterator[_Program]:
    """Name, both passes, (shape, dtype) of arrays, and FLOPs of each kernel's tile."""
    return _attention() if operation == "attention" else _head()


def _attention() -> Iterator[_Program]:
    import jax
    import jax.numpy as jnp

    from benchmarks.rooflines.tpu import of_attention
    from jaxrl_post.kernels.attention import Scoring, Sight, attention
    from jaxrl_post.kernels.attention.shapes import SHAPES

    for name, shape in SHAPES.items():

        def both(query, key, value, at, ends, towards, shape=shape):
            def run(query, key, value):
                return attention(
                    query, key, value,
                    Sight(at, at, ends),
                    scoring=Scoring(shape.window, softcap=shape.softcap),
                    implementation="pallas_tpu",
                )  # fmt: skip

            out, pull = jax.vjp(run, query, key, value)
            return out, pull(towards)

        tokens = shape.batch, shape.length
        of_keys = shape.batch, shape.kv_heads, shape.length
        arrays: list[tuple[Any, Any]] = [
            ((*tokens, shape.heads, shape.head_dim), jnp.bfloat16),
            ((*of_keys, shape.head_dim), jnp.bfloat16),
            ((*of_keys, shape.value_dim), jnp.bfloat16),
            (tokens, jnp.int32),
            (tokens, jnp.int32),
            ((*tokens, shape.heads, shape.value_dim), jnp.bfloat16),
        ]
        counted = of_attention(shape, shape.length)
        yield name, both, arrays, [kernel.flops / kernel.steps for kernel in counted]


def _head() -> Iterator[_Program]:
    import jax
    import jax.numpy as jnp

    from benchmarks.rooflines.tpu import of_token_logprob
    from jaxrl_post.kernels.token_logprob import Scaling, token_logprob
    from jaxrl_post.kernels.token_logprob.shapes import SHAPES

    for name, shape in SHAPES.items():
        if shape.kept:
            continue

        def both(hidden, weight, targets, towards, cap=shape.softcap):
            def run(hidden, weight):
                found = token_logprob(
                    hidden,
                    weight,
                    targets,
                    scaling=Scaling(softcap=cap),
                    implementation="pallas_tpu",
                )
                return tuple(found)

            values, pull = jax.vjp(run, hidden, weight)
            return values, pull((towards, towards, towards))

        rows = (1, shape.rows)
        arrays: list[tuple[Any, Any]] = [
            ((*rows, shape.width), jnp.bfloat16),
            ((shape.vocab, shape.width), jnp.bfloat16),
            (rows, jnp.int32),
            (rows, jnp.float32),
        ]
        counted = of_token_logprob(shape.rows, shape.width, shape.vocab)
        yield name, both, arrays, [kernel.flops / kernel.steps for kernel in counted]


def _compile(
    written: Path, program: Callable[..., Any], arrays: list[tuple[Any, Any]]
) -> None:
    """Compiles for the chip; `written` has the files of this program alone."""
    import jax
    from jax.experimental import topologies

    from launch import plan

    plan.load()  # Variables that libtpu reads from the process's environment.
    for path in written.iterdir():
        path.unlink()
    chip = topologies.get_topology_desc(TOPOLOGY, platform="tpu").devices[0]
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh([chip], ("dp",), axis_types=kinds)
    sharding = jax.NamedSharding(mesh, jax.P())
    shapes = [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in arrays]
    with jax.set_mesh(mesh):
        traced = jax.jit(program).trace(*shapes)
        traced.lower(lowering_platforms=("tpu",)).compile()


if __name__ == "__main__":
    main(sys.argv[1:])
