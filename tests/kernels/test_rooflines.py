"""The rooflines of attention count what the kernels do; kernels.md has them.

FLOPs and bytes are compared with the kernels as they are traced; which tiles they
compute, with the lists that they get.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.rooflines import hopper, tables
from benchmarks.rooflines import tpu as rooflines
from benchmarks.rooflines.counted import listed_tiles
from jaxrl_post.kernels.attention import Scoring, Sight, attention
from jaxrl_post.kernels.attention.kernel_tiles import (
    KernelSettings,
    Shape,
    Tile,
    TileList,
)
from jaxrl_post.kernels.attention.packed import Facts
from jaxrl_post.kernels.attention.shapes import SHAPES
from jaxrl_post.kernels.attention.shapes import Shape as Sizes

GUIDE = Path(__file__).parents[2] / "docs" / "explanation" / "kernels.md"


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("tile", [Tile(128, 64), Tile(64, 128), Tile(128, 256)])
@pytest.mark.parametrize(
    ("row_tokens", "window"), [(512, None), (256, None), (512, 65), (256, 100)]
)
def test_listed_tiles_are_those_of_the_kernels(row_tokens, window, tile, by_key):
    index = np.arange(512, dtype=np.int32)
    ends = (index // row_tokens + 1) * row_tokens
    facts = Facts(*(jnp.asarray(a)[None] for a in (index, index % row_tokens, ends)))
    shape = Shape(1, 512, 1, 1, 64, 64, tile)
    settings = KernelSettings(1.0, window, None, tile)
    listed = TileList.of(settings, shape, by_key, facts, facts, True)
    count = int(listed.count[0])
    found = zip(listed.sums.tolist(), (listed.others // 2).tolist(), strict=True)
    tiles = listed_tiles(512, row_tokens, window, tile)
    expected = np.argwhere(tiles.T if by_key else tiles).tolist()
    assert [list(pair) for pair in found][:count] == expected


def equations(jaxpr):
    """All equations of a program and of its inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def kernels(shape, implementation, call):
    """Equations that call a kernel, by its name, of a traced pass and its gradient."""
    tokens = shape.batch, shape.length
    of_keys = shape.batch, shape.kv_heads, shape.length

    def both_passes(query, key, value, at, towards):
        def run(query, key, value):
            return attention(
                query, key, value,
                Sight(at, at, at), scoring=Scoring(shape.window, softcap=shape.softcap),
                implementation=implementation, interpret=True,
            )  # fmt: skip

        out, pull = jax.vjp(run, query, key, value)
        return out, pull(towards)

    def array(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    traced = jax.make_jaxpr(both_passes)(
        array(*tokens, shape.heads, shape.head_dim),
        array(*of_keys, shape.head_dim),
        array(*of_keys, shape.value_dim),
        jax.ShapeDtypeStruct(tokens, jnp.int32),
        array(*tokens, shape.heads, shape.value_dim),
    )
    found = [e for e in equations(traced.jaxpr) if e.primitive.name == call]
    assert [e.params["name"] for e in found] == [
        "attention_forward", "attention_query", "attention_key",
    ]  # fmt: skip
    return found


def size(aval):
    return math.prod(aval.shape) * aval.dtype.itemsize


# Groups; padded heads and a window; latent attention's; wide heads with a cap, whose
# gradient of keys and values computes the scores twice. The tiles of each kernel: rows
# have two sequences of 256 tokens.
@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        (Sizes(2, 512, 4, 2, 64, 64), (96, 96, 96)),
        (Sizes(1, 512, 2, 2, 80, 80, 50), (20, 20, 20)),
        (Sizes(1, 512, 2, 1, 192, 128), (24, 24, 24)),
        (Sizes(1, 512, 2, 1, 256, 256, None, 50.0), (24, 48, 80)),
    ],
)
def test_a_hopper_kernel_does_what_is_counted(shape, steps):
    found = hopper.attention_kernels(shape, 256)
    traced = kernels(shape, "pallas_gpu", "mpmd_map")
    for kernel, number, call in zip(found, steps, traced, strict=True):
        (jaxpr,), (mesh,) = call.params["jaxprs"], call.params["meshes"]
        every = {}
        for equation in equations(jaxpr):
            every.setdefault(equation.primitive.name, []).append(equation)
        # Code that is written once is run by both warpgroups, unless each has a branch.
        wide = call.params["name"] == "attention_key" and shape.head_dim == 256
        both = 1 if wide else 2
        # Operands lie in tiles of 8 x a row of the swizzle.
        widths = (e.invars[1].aval.shape for e in every["wgmma_ref"])
        sums = (math.prod(e.invars[0].aval.shape) for e in every["wgmma_ref"])
        flops = sum(2 * n * w[-3] * w[-1] for n, w in zip(sums, widths, strict=True))
        assert kernel.flops == number * both * flops
        # Barriers of what stays are single; buffers hold halves, or slots.
        staying = passing = 0.0
        for equation in every["copy_gmem_to_smem"]:
            into, barrier = (equation.invars[i].aval for i in (1, 2))
            if barrier.shape:
                passing += size(into) / into.shape[0]
            else:
                staying += size(into) / into.shape[0]
        assert kernel.loaded == number * passing + math.prod(mesh.grid) * staying
        # One per score, or more; few are per row.
        special = (e.outvars[0].aval for e in every["exp"] + every.get("div", []))
        special = sum(math.prod(a.shape) for a in special if len(a.shape) == 2)
        assert kernel.special == number * both * special


@pytest.mark.parametrize(
    ("shape", "tile", "tasks"),
    [
        (Sizes(1, 2048, 16, 2, 64, 64), 512, 2 * 2 * 3),
        (Sizes(2, 2048, 8, 1, 192, 128, 300), 256, 2 * 2 * 9),
    ],
)
def test_a_tpu_kernel_does_what_is_counted(shape, tile, tasks):
    """Two blocks a sequence of 1,024, or four that see two blocks before them."""
    found = rooflines.of_attention(shape, 1024, unit=1)
    tokens = shape.batch * shape.kv_heads * 2048
    blocks = {"query": tokens // tile, "key": tokens // tile}
    traced = kernels(shape, "pallas_tpu", "pallas_call")
    for kernel, call in zip(found, traced, strict=True):
        assert kernel.steps == tasks
        # Scores are masked in one of two branches, which have the same products.
        flops = sum(
            2 * math.prod(e.outvars[0].aval.shape) * e.invars[0].aval.shape[axis]
            for e in equations(call.params["jaxpr"])
            if e.primitive.name == "dot_general"
            for (axis,), _ in e.params["dimension_numbers"][:1]
        )
        assert kernel.flops == tasks * flops / 2
        # Query, key, value, facts of queries and of keys; towards, and what belongs to
        # a lane. A block stays where it is as long as the next tile has the same.
        kinds = ["query", "key", "key", "query", "key"]
        kinds += {
            "attention_forward": ["query"] * 2,
            "attention_query": ["query"] * 4,
            "attention_key": ["query"] * 3 + ["key"] * 2,
        }[call.params["name"]]
        stays = "key" if call.params["name"] == "attention_key" else "query"
        moved = 0
        mappings = call.params["grid_mapping"].block_mappings
        for kind, mapping in zip(kinds, mappings, strict=True):
            sizes = (getattr(part, "block_size", 1) for part in mapping.block_shape)
            each = math.prod(sizes) * mapping.array_aval.dtype.itemsize
            moved += each * (blocks[kind] if kind == stays else tasks)
        assert kernel.moved == moved


def test_numbers_of_a_hopper_kernel():
    """One head of 128 numbers, 256 tokens: two blocks of 2 and 4 tiles of 64 keys."""
    shape = Sizes(1, 256, 1, 1, 128, 128)
    forward, query, key = hopper.attention_kernels(shape, 256)
    product = 2 * 128 * 64 * 128
    assert [kernel.flops / product / 6 for kernel in (forward, query, key)] == [2, 3, 4]
    assert [kernel.needed / product / 6 for kernel in (forward, query, key)] == [
        2,
        1,
        3,
    ]
    assert forward.special == 6 * 128 * 64
    # Keys, values and three facts of each key pass; queries stay.
    assert forward.loaded == 6 * 64 * (2 * 256 + 12) + 2 * 128 * 256
    # Query, key, value and result in two bytes, and the normalizer in four.
    assert forward.moved == 4 * 256 * 128 * 2 + 256 * 4
    # 2 of 132 multiprocessors have work, one of them twice as much as the other.
    assert forward.idle == 4 * 132 / 6
    seconds = 4 * product * 2 * 132 / 989.5e12
    assert forward.bounds()["products"] == pytest.approx(seconds)


def test_attention_on_hopper_waits_for_no_memory():
    """So an H200, whose memory alone is faster, takes as long as an H100."""
    for shape in SHAPES.values():
        for row_tokens in (shape.length, 1024):
            for kernel in hopper.attention_kernels(shape, row_tokens):
                assert kernel.bounds()["HBM"] < kernel.seconds


def test_the_guide_has_the_tables(capsys):
    tables.main()
    printed = capsys.readouterr().out
    expected = GUIDE.read_text()[GUIDE.read_text().index("## token_logprob: ") :]
    assert expected.strip() == printed.strip(), (
        "docs/explanation/kernels.md differs: python -m benchmarks.rooflines "
        "prints its tables"
    )
