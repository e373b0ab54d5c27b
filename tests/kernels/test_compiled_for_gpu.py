"""The kernels compile for real Hopper GPUs, at the shapes of real models, without one.

ptxas says how many registers a thread needs, and whether some had to be spilled to
memory; Mosaic refuses more shared memory than there is. `make check-kernels` installs
the compilers; CI runs a part.
"""

import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from benchmarks.rooflines.hopper import decode_shared_bytes, shared_bytes
from jaxrl_post.config.plan import PlanConfig, PlannedRollout
from jaxrl_post.kernels.attention import Scoring, Sight, attention
from jaxrl_post.kernels.attention.shapes import SHAPES as ATTENTION
from jaxrl_post.kernels.decode_attention import (
    OwnKeys,
    QuantizedEntries,
    SharedKeys,
    decode_attention,
)
from jaxrl_post.kernels.decode_attention.shapes import SHAPES as DECODE
from jaxrl_post.kernels.next_token import next_token
from jaxrl_post.kernels.next_token.pallas_gpu import rows_of
from jaxrl_post.kernels.next_token.shapes import SHAPES as NEXT_TOKEN
from jaxrl_post.kernels.token_logprob import Scaling, token_logprob
from jaxrl_post.kernels.token_logprob.kept import GATHERED_BYTES
from jaxrl_post.kernels.token_logprob.shapes import SHAPES as TOKEN_LOGPROB
from jaxrl_post.models import ModelConfig
from jaxrl_post.programs.planning.gpus import target_config
from jaxrl_post.programs.planning.sampling import make_sampler
from jaxrl_post.programs.planning.training import make_trainer
from jaxrl_post.sharding import create_mesh

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the compilers for NVIDIA's GPUs: make check-kernels",
)
H100 = target_config("NVIDIA H100 80GB HBM3")
# Bytes of shared memory that a block of threads may have.
SHARED_MEMORY = 227 * 1024
PART = {"llama-3.1-8b", "deepseek-v3, tp8", "odd"}
DECODE_PART = {"llama-3.1-8b, int8", "deepseek-v3, tp8", "odd"}


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """Keeps no programs on disk: a GPU that is not there loads none."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def dump(tmp_path, monkeypatch) -> Path:
    """Folder into which Mosaic writes ptxas's output on each kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return tmp_path


@pytest.fixture(scope="module")
def gpu() -> Mesh:
    found = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    )
    return Mesh(found.devices[:1], ("dp",), axis_types=(AxisType.Auto,))


def compiled(mesh, function, *shapes):
    """A program for the GPU, from trees of ShapeDtypeStruct."""
    sharding = jax.NamedSharding(mesh, jax.P())
    arrays = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
    )
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
        return lowered.compile()


def check_resources(
    dump: Path, kernel: str, spilled: int = 0, *, held: Collection[int]
) -> None:
    """Every program of a kernel fits into shared memory, and into registers.

    Args:
        dump: where Mosaic wrote what it and ptxas say.
        kernel: its name.
        spilled: bytes of a thread's registers that may be kept in memory.
        held: bytes of shared memory that its buffers take, of each program.
    """
    said = [path.read_text() for path in dump.glob(f"{kernel}_*.ptxas")]
    assert said
    for text in said:
        assert "for 'sm_90a'" in text
        (stored,) = re.findall(r"stack frame, (\d+) bytes spill stores", text)
        assert int(stored) <= spilled, f"{kernel} spills {stored} bytes a thread"
    used = [path.read_text() for path in dump.glob(f"{kernel}_*.resources.txt")]
    assert used
    for text in used:
        (size,) = re.findall(r"smem_scratch_bytes=(\d+)", text)
        share = f"{kernel} takes {int(size) / 1024:.1f} KiB of 227, for {held} bytes"
        # Barriers take a little more.
        assert int(size) + 2048 < SHARED_MEMORY, share
        # So do alignment, and sums over the threads of a warpgroup: 2 KiB.
        assert any(0 <= int(size) - each < 4096 for each in held), share


@pytest.mark.parametrize(
    "name",
    [
        name if name in PART else pytest.param(name, marks=pytest.mark.all)
        for name in TOKEN_LOGPROB
    ],
)
def test_token_logprob(gpu, dump, name):
    shape = TOKEN_LOGPROB[name]

    def both_passes(hidden, weight, targets, mask, kept, towards):
        def run(hidden, weight):
            found = token_logprob(
                hidden,
                weight,
                targets,
                mask=mask,
                kept=kept,
                scaling=Scaling(softcap=shape.softcap),
            )
            return tuple(found)

        values, pull = jax.vjp(run, hidden, weight)
        return values, pull((towards, towards, towards))

    def rows(dtype):
        return jax.ShapeDtypeStruct((1, shape.rows), dtype)

    program = compiled(
        gpu,
        both_passes,
        jax.ShapeDtypeStruct((1, shape.rows, shape.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.vocab, shape.width), jnp.bfloat16),
        rows(jnp.int32),
        rows(jnp.bool_),
        jax.ShapeDtypeStruct((1, shape.rows, shape.kept), jnp.int32)
        if shape.kept
        else None,
        rows(jnp.float32),
    )
    text = program.as_text()
    assert text is not None
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2
    # Kept tokens are not the kernels' affair, and Mosaic compiles a kernel once.
    if not shape.kept:
        # Steps of 48 KiB; statistics of each row, or the gradient of a tile of logits.
        check_resources(dump, "token_logprob_forward", held=[(4 * 48 + 4) * 1024])
        spilled = 0 if shape.softcap is None else 4
        held = [(3 * 48 + 64) * 1024]
        check_resources(dump, "token_logprob_gradient", spilled, held=held)
    # No array has a row's logits, of all rows or of some.
    arrays = re.findall(r"\w+\[(\d+(?:,\d+)*)\]", text)
    sizes = [[int(size) for size in sizes.split(",")] for sizes in set(arrays)]
    assert not [s for s in sizes if shape.vocab in s and shape.width not in s]
    # The weight's rows of kept tokens are gathered for a few rows at a time.
    gathered = [s for s in sizes if shape.kept and s[-2:] == [shape.kept, shape.width]]
    assert all(2 * math.prod(size) <= GATHERED_BYTES for size in gathered)


@pytest.mark.parametrize(
    "name",
    [
        name if name in PART else pytest.param(name, marks=pytest.mark.all)
        for name in ATTENTION
    ],
)
def test_attention(gpu, dump, name):
    shape = ATTENTION[name]
    tokens = shape.batch, shape.length

    def both_passes(query, key, value, at, towards):
        def run(query, key, value):
            sinks = jnp.zeros(shape.heads) if shape.sinks else None
            return attention(
                query, key, value,
                Sight(at, at, at),
                scoring=Scoring(shape.window, None, shape.softcap, sinks),
            )  # fmt: skip

        out, pull = jax.vjp(run, query, key, value)
        return out, pull(towards)

    def array(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    of_keys = shape.batch, shape.kv_heads, shape.length
    program = compiled(
        gpu,
        both_passes,
        array(*tokens, shape.heads, shape.head_dim),
        array(*of_keys, shape.head_dim),
        array(*of_keys, shape.value_dim),
        jax.ShapeDtypeStruct(tokens, jnp.int32),
        array(*tokens, shape.heads, shape.value_dim),
    )
    text = program.as_text()
    assert text is not None
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3
    # Sums fill the registers, and other numbers of a thread are spilled: the sums of
    # keys and of values together, and of wide heads.
    wide = shape.head_dim > 192
    both = 64 if shape.head_dim <= 128 else 256
    for kernel, spilled in (
        ("attention_forward", 512 if wide else 0),
        ("attention_query", 96 if wide else 0),
        ("attention_key", 0 if wide else both),
    ):
        held = shared_bytes(kernel, shape.head_dim, shape.value_dim)
        check_resources(dump, kernel, spilled, held=[held])


def entries(shape, batch, keys, width):
    """Keys or values, of codes if the shape has them."""
    if not width:
        return None
    whole = batch, shape.kv_heads, keys, width
    if shape.codes is None:
        return jax.ShapeDtypeStruct(whole, jnp.bfloat16)
    return QuantizedEntries(
        jax.ShapeDtypeStruct(whole, jnp.dtype(shape.codes)),
        jax.ShapeDtypeStruct((*whole[:3], 1), jnp.float32),
    )


@pytest.mark.parametrize(
    "name",
    [
        name if name in DECODE_PART else pytest.param(name, marks=pytest.mark.all)
        for name in DECODE
    ],
)
def test_decode_attention(gpu, dump, name):
    shape = DECODE[name]

    def attend(query, key, value, at, positions, shared):
        if shared is not None:
            shared = SharedKeys(*shared, shape.members)
        sinks = jnp.zeros(shape.heads) if shape.sinks else None
        return decode_attention(
            query, OwnKeys(key, value, positions), at, shared=shared,
            scoring=Scoring(shape.window, None, shape.softcap, sinks),
        )  # fmt: skip

    def integers(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    shared, widths = None, (shape.head_dim, shape.value_dim)
    if shape.members:
        sizes = -(-shape.batch // shape.members), shape.shared
        common = [entries(shape, *sizes, width) for width in widths]
        shared = *common, integers(*sizes), integers(shape.batch)
    of_query = shape.batch, shape.queries, shape.heads, shape.head_dim
    program = compiled(
        gpu,
        attend,
        jax.ShapeDtypeStruct(of_query, jnp.bfloat16),
        *(entries(shape, shape.batch, shape.own, width) for width in widths),
        integers(shape.batch, shape.queries),
        integers(shape.batch, shape.own),
        shared,
    )
    text = program.as_text()
    assert text is not None
    calls = text.count('custom_call_target="mosaic_gpu_v2"')
    assert calls == 1 + (shared is not None)
    check_resources(dump, "decode_attention", held=decode_shared_bytes(shape))
    # No array of keys is copied, not even to be laid out otherwise.
    if name not in ("odd", "views of 16"):
        keys = rf"(?:bf16|s8|f8\w+)\[\d+,\d+,{shape.own},{shape.head_dim}\]"
        assert not re.search(rf"= {keys}\S* (?:copy|pad|fusion)\(", text)


@pytest.mark.parametrize(
    "name",
    [
        name if name in PART else pytest.param(name, marks=pytest.mark.all)
        # The last one's vocabulary is no multiple of 8.
        for name in list(NEXT_TOKEN)[:-1]
    ],
)
def test_next_token(gpu, dump, name):
    shape = NEXT_TOKEN[name]
    program = compiled(
        gpu,
        functools.partial(next_token, softcap=shape.softcap),
        jax.ShapeDtypeStruct((shape.rows, shape.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.vocab, shape.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.rows,), jnp.float32),
        jax.ShapeDtypeStruct((shape.rows,), jnp.float32),
    )
    text = program.as_text()
    assert text is not None
    assert calls(text, "next_token_statistics") == 1
    rows = rows_of(shape.rows)
    # Steps of a tile; two numbers of each row and part.
    held = 4 * (rows + 256) * 128 + 128 * rows
    check_resources(dump, "next_token_statistics", held=[held])
    assert not re.search(
        rf"\[(?:{shape.rows},{shape.vocab}|{shape.vocab},{shape.rows})\]", text
    )
    # The matrix is read where it lies.
    assert not re.search(
        rf"= bf16\[{shape.vocab},{shape.width}\]\S* (copy|pad|fusion)\(", text
    )


def test_the_kernel_is_not_taken_where_it_cannot_compute(gpu):
    """With float32 or an odd width "auto" takes XLA's program."""

    def run(hidden, weight, targets):
        return token_logprob(hidden, weight, targets).logprob

    def calls(width, dtype):
        program = compiled(
            gpu,
            run,
            jax.ShapeDtypeStruct((1, 8, width), dtype),
            jax.ShapeDtypeStruct((256, width), dtype),
            jax.ShapeDtypeStruct((1, 8), jnp.int32),
        )
        return program.as_text().count("mosaic_gpu")

    assert calls(128, jnp.bfloat16) > 0
    assert calls(128, jnp.float32) == 0
    assert calls(100, jnp.bfloat16) == 0

    def drawn(width, dtype, vocab=512):
        program = compiled(
            gpu,
            next_token,
            jax.ShapeDtypeStruct((8, width), dtype),
            jax.ShapeDtypeStruct((vocab, width), dtype),
            *[jax.ShapeDtypeStruct((8,), jnp.float32)] * 2,
        )
        return program.as_text().count("mosaic_gpu")

    assert drawn(128, jnp.bfloat16) > 0
    assert drawn(128, jnp.float32) == drawn(100, jnp.bfloat16) == 0
    assert drawn(128, jnp.bfloat16, 516) == 0


def gpus(mesh: str) -> Mesh:
    """Four GPUs."""
    found = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x4"
    )
    return create_mesh(mesh, found.devices)


@pytest.fixture(scope="module")
def four_gpus() -> Mesh:
    return gpus("dp2,tp2")


SMALL = ModelConfig(
    "qwen2", 32_000, 512, 1024, 2,
    num_heads=8, num_kv_heads=2, head_dim=64, max_length=2048, qkv_bias=True,
)  # fmt: skip


def text_of(program) -> str:
    with jax.set_mesh(program.mesh):
        traced = program.function.trace(*program.arguments, **program.static)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text is not None
    return text


def calls(text: str, kernel: str) -> int:
    """Number of Mosaic kernels of a name in the program."""
    return len(re.findall(rf'custom_call_target="mosaic_gpu_v2".*{kernel}', text))


def test_a_train_step_takes_the_kernels(four_gpus):
    """The step of `launch.grpo`: attention and log-probs are the kernels."""
    length = 1024
    config = PlanConfig(model="", topology="", mesh="dp2,tp2", row_tokens=length)
    model = dataclasses.replace(SMALL, num_layers=1)
    trainer = make_trainer(config, model, four_gpus)
    (program,) = (p for p in trainer.programs(()) if p.name == "accumulate")
    text = text_of(program)
    # Rematerialisation computes the forward pass twice.
    assert calls(text, "attention_forward") == 2
    assert calls(text, "attention_query") == calls(text, "attention_key") == 1
    assert calls(text, "token_logprob_forward") == 1
    assert calls(text, "token_logprob_gradient") == 1
    # No array has a logit for every token; their gradient, 32 MiB, is one chunk.
    vocab = SMALL.vocab_size // 2
    assert not re.search(rf"f32\[(?:1,)?{length},{vocab}\]", text)
    assert not re.search(rf"\[(?:1,)?{vocab},{length}\]", text)


def test_a_train_step_of_cut_rows_is_a_ring_of_the_kernels():
    """With cp a device attends to one chunk of keys after another."""
    config = PlanConfig(model="", topology="", mesh="cp2,tp2", row_tokens=2048)
    model = dataclasses.replace(SMALL, num_layers=1)
    trainer = make_trainer(config, model, gpus("cp2,tp2"))
    (program,) = (p for p in trainer.programs(()) if p.name == "accumulate")
    text = text_of(program)
    # Two chunks; rematerialisation computes the forward pass twice.
    assert calls(text, "attention_forward") == 4
    assert calls(text, "attention_query") == calls(text, "attention_key") == 2
    assert "collective-permute" in text
    # A device's key/value head has the keys of a chunk, and never the keys of whole
    # rows.
    assert re.search(r"bf16\[1,1,1024,64\]", text)
    assert not re.search(r"\[1,1,2048,64\]", text)


@pytest.mark.parametrize(
    "cache_dtype", [None, pytest.param("int8", marks=pytest.mark.all)]
)
def test_a_decoding_step_copies_no_cache(four_gpus, cache_dtype):
    """Keys and values are written and read in one layout, the whole burst long."""
    rollout = PlannedRollout(
        prompts_per_step=8, max_prompt_tokens=512, max_tokens=512,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    config = PlanConfig(model="", topology="", rollout=rollout)
    sampler = make_sampler(config, SMALL, four_gpus)
    assert sampler is not None
    # The last one has the largest view: 64 samples of up to 512 tokens, on two parts.
    *_, program = sampler.programs((), ())
    text = text_of(program)
    # Own and shared keys of two layers.
    assert calls(text, "decode_attention") == 4
    assert calls(text, "next_token_statistics") == 1
    keys = r"= \w+\[32,1,512,64\]\S*"
    made = re.findall(rf"{keys} (?:copy|transpose|pad|fusion)\(.*", text)
    # New keys and values of two layers are scattered, and nothing else is made.
    assert len(made) == 4
    assert all("calls=%fused_scatter" in line for line in made)
