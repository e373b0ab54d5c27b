"""The kernels compile for real Hopper GPUs, at the shapes of real models, without one.

ptxas says how many registers a thread needs, and whether some had to be spilled to
memory; Mosaic refuses more shared memory than there is. `make check-kernels` installs
the compilers; CI runs a part.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jaxrl_post.kernels.attention import attention
from jaxrl_post.kernels.attention.shapes import SHAPES as ATTENTION
from jaxrl_post.kernels.token_logprob import token_logprob
from jaxrl_post.kernels.token_logprob.shapes import SHAPES as TOKEN_LOGPROB

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the compilers for NVIDIA's GPUs: make check-kernels",
)
# What XLA must know of an H100.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 clock_rate_ghz: 1.98 fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  device_memory_size: 84929347584 memory_bandwidth: 3352320000000
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 12 minor: 9 }
"""
# Bytes of shared memory that a block of threads may have.
SHARED_MEMORY = 227 * 1024
PART = {"qwen2.5-0.5b", "llama-3.1-8b", "deepseek-v3, tp8", "odd"}


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
    """Where Mosaic writes what ptxas says of each kernel."""
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


def check_resources(dump: Path, kernel: str, spilled: int = 0) -> None:
    """Every program of a kernel fits into shared memory, and into registers.

    Args:
        dump: where Mosaic wrote what it and ptxas say.
        kernel: its name.
        spilled: bytes of a thread's registers that may be kept in memory.
    """
    said = [path.read_text() for path in dump.glob(f"{kernel}_*.ptxas")]
    assert said
    for text in said:
        assert "for 'sm_90a'" in text
        (stored,) = re.findall(r"stack frame, (\d+) bytes spill stores", text)
        assert int(stored) <= spilled
    used = [path.read_text() for path in dump.glob(f"{kernel}_*.resources.txt")]
    assert used
    for text in used:
        (size,) = re.findall(r"smem_scratch_bytes=(\d+)", text)
        # Barriers and alignment take a little more.
        assert int(size) + 2048 < SHARED_MEMORY


@pytest.mark.parametrize(
    "name",
    [
        name if name in PART else pytest.param(name, marks=pytest.mark.all)
        for name, shape in TOKEN_LOGPROB.items()
        if not shape.kept
    ],
)
def test_token_logprob(gpu, dump, name):
    shape = TOKEN_LOGPROB[name]

    def both_passes(hidden, weight, targets, mask, towards):
        def run(hidden, weight):
            found = token_logprob(
                hidden, weight, targets, mask=mask, softcap=shape.softcap
            )
            return tuple(found)

        values, pull = jax.vjp(run, hidden, weight)
        return values, pull((towards, towards))

    def rows(dtype):
        return jax.ShapeDtypeStruct((1, shape.rows), dtype)

    program = compiled(
        gpu,
        both_passes,
        jax.ShapeDtypeStruct((1, shape.rows, shape.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.vocab, shape.width), jnp.bfloat16),
        rows(jnp.int32),
        rows(jnp.bool_),
        rows(jnp.float32),
    )
    text = program.as_text()
    assert text is not None
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2
    for kernel in ("token_logprob_forward", "token_logprob_gradient"):
        check_resources(dump, kernel)
    # No array has a row's logits, of all rows or of some.
    arrays = re.findall(r"\w+\[(\d+(?:,\d+)*)\]", text)
    sizes = [[int(size) for size in sizes.split(",")] for sizes in set(arrays)]
    assert not [s for s in sizes if shape.vocab in s and shape.width not in s]


@pytest.mark.parametrize(
    "name",
    [
        name if name in PART else pytest.param(name, marks=pytest.mark.all)
        for name, shape in ATTENTION.items()
        if shape.value_dim <= 128
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
                query_positions=at, kv_positions=at, ends=at,
                window=shape.window, softcap=shape.softcap, sinks=sinks,
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
    check_resources(dump, "attention_forward")
    check_resources(dump, "attention_query")
    # The sums of keys and of values fill the registers, and a few other numbers of a
    # thread are spilled.
    check_resources(dump, "attention_key", spilled=64 if shape.head_dim <= 128 else 256)


def test_the_kernel_is_not_taken_where_it_cannot_compute(gpu):
    """With kept tokens, float32 or an odd width, "auto" takes XLA's program."""

    def run(hidden, weight, targets, kept):
        return token_logprob(hidden, weight, targets, kept=kept).logprob

    def calls(width, dtype, kept=None):
        ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        program = compiled(
            gpu,
            run,
            jax.ShapeDtypeStruct((1, 8, width), dtype),
            jax.ShapeDtypeStruct((256, width), dtype),
            ids,
            kept and jax.ShapeDtypeStruct((1, 8, kept), jnp.int32),
        )
        return program.as_text().count("mosaic_gpu")

    assert calls(128, jnp.bfloat16) > 0
    assert calls(128, jnp.bfloat16, kept=3) == 0
    assert calls(128, jnp.float32) == 0
    assert calls(100, jnp.bfloat16) == 0
