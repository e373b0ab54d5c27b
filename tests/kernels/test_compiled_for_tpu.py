"""The kernels compile for real TPUs, at the shapes of real models, without a TPU.

Mosaic refuses tiles that do not fit into VMEM, and an operation or a layout that the
chip does not have. `make check-kernels` installs the compiler; CI runs a part.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from jaxrl_post.config.plan import PlanConfig, PlannedRollout
from jaxrl_post.kernels.attention import Scoring, Sight, attention
from jaxrl_post.kernels.attention import pallas_tpu as attention_tpu
from jaxrl_post.kernels.attention.shapes import SHAPES as ATTENTION
from jaxrl_post.kernels.decode_attention import (
    OwnKeys,
    QuantizedEntries,
    SharedKeys,
    decode_attention,
    write_entries,
)
from jaxrl_post.kernels.decode_attention.shapes import SHAPES as DECODE
from jaxrl_post.kernels.linear_attention import LinearInputs, linear_step
from jaxrl_post.kernels.next_token import next_token
from jaxrl_post.kernels.next_token.shapes import SHAPES as NEXT_TOKEN
from jaxrl_post.kernels.token_logprob import Scaling, token_logprob
from jaxrl_post.kernels.token_logprob import pallas_tpu as token_logprob_tpu
from jaxrl_post.kernels.token_logprob.shapes import SHAPES as TOKEN_LOGPROB
from jaxrl_post.losses.kl import k3
from jaxrl_post.losses.policy import clipped_surrogate
from jaxrl_post.losses.reduce import token_mean
from jaxrl_post.models import ModelConfig
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.programs.planning.sampling import make_sampler
from jaxrl_post.sharding import DEFAULT_RULES, Chunks, create_mesh
from launch import plan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu, the compiler for TPUs: make check-kernels",
)
ROOT = Path(__file__).parents[2]
CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]
EVERY = pytest.mark.all
# Cases that CI compiles; `make check-kernels` compiles everything.
PART = {
    *("qwen2.5-0.5b", "deepseek-v3, tp8", "gpt-oss-20b", "odd"),
    "llama-3.1-8b, int8",
}


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """Keeps no programs on disk: the compiler of a TPU that is not there loads none."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(params=[CHIPS[0], *(pytest.param(c, marks=EVERY) for c in CHIPS[1:])])
def chip(request) -> Mesh:
    """A mesh of one chip of this kind."""
    plan.load()  # Variables that libtpu reads from the process's environment.
    found = topologies.get_topology_desc(request.param, platform="tpu").devices[0]
    return Mesh([found], ("dp",), axis_types=(AxisType.Auto,))


def _is_array(node) -> bool:
    """Whether a node is a (shape, dtype)."""
    shape = node[0] if isinstance(node, tuple) else None
    return isinstance(shape, tuple) and all(isinstance(size, int) for size in shape)


def compiled(chip, function, *shapes) -> str:
    """Text of a program for a chip, from trees of (shape, dtype)."""
    sharding = jax.NamedSharding(chip, jax.P())
    arrays = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(*leaf, sharding=sharding),
        shapes,
        is_leaf=_is_array,
    )
    with jax.set_mesh(chip):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("tpu",))
        text = lowered.compile().as_text()
    assert text is not None
    return text


def named(shapes):
    return [
        name if name in PART else pytest.param(name, marks=EVERY) for name in shapes
    ]


DTYPES = [jnp.bfloat16, pytest.param(jnp.float32, marks=EVERY)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", named(ATTENTION))
def test_attention(chip, name, dtype):
    shape = ATTENTION[name]
    tokens = shape.batch, shape.length

    def both_passes(query, key, value, positions, ends, towards):
        sinks = jnp.zeros(shape.heads) if shape.sinks else None

        def run(query, key, value):
            return attention(
                query, key, value,
                Sight(positions, positions, ends),
                scoring=Scoring(shape.window, None, shape.softcap, sinks),
                implementation="auto",
            )  # fmt: skip

        out, pull = jax.vjp(run, query, key, value)
        return out, pull(towards)

    text = compiled(
        chip,
        both_passes,
        ((*tokens, shape.heads, shape.head_dim), dtype),
        ((shape.batch, shape.kv_heads, shape.length, shape.head_dim), dtype),
        ((shape.batch, shape.kv_heads, shape.length, shape.value_dim), dtype),
        (tokens, jnp.int32),
        (tokens, jnp.int32),
        ((*tokens, shape.heads, shape.value_dim), dtype),
    )
    for kernel in ("forward", "query", "key"):
        assert calls(text, f"attention_{kernel}") == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "length", [2048, *(pytest.param(2**n, marks=EVERY) for n in (17, 18))]
)
def test_attention_of_chunks(length, dtype):
    """An 8B model's heads on a v5p of 16 chips, cp8: the kernels are in the ring."""
    plan.load()
    devices = topologies.get_topology_desc("v5p:4x2x2", platform="tpu").devices
    mesh = create_mesh("cp8,tp2", devices)

    def both_passes(query, key, value, ends, towards):
        chunks = Chunks.of((1, length), DEFAULT_RULES)
        ends = chunks.split(ends)

        def run(query, key, value):
            return attention(
                query, key, value,
                Sight(ends, ends, ends, chunks.indices), rules=chunks.rules,
            )  # fmt: skip

        out, pull = jax.vjp(run, query, key, value)
        return out, pull(towards)

    def array(shape, spec, dtype):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    of_query = array((8, length // 8, 32, 128), jax.P("cp", None, "tp"), dtype)
    of_key = array((8, 8, length // 8, 128), jax.P("cp", "tp"), dtype)
    ends = array((1, length), jax.P(), jnp.int32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(both_passes).trace(of_query, of_key, of_key, ends, of_query)
        text = lowered.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert text is not None
    for kernel in ("forward", "query", "key"):
        # In the loop, and for the last chunk.
        assert calls(text, f"attention_{kernel}") == 2
    assert "collective-permute" in text
    assert "all-gather" not in text


def calls(text: str, kernel: str) -> int:
    """Number of Mosaic kernels of a name in the program."""
    # The name also says which transformation of JAX made the call.
    return len(re.findall(rf"%\w*{kernel}[_.\d]* = .*tpu_custom_call", text))


def entries(shape, dtype, batch, keys, width):
    """Keys or values as (shape, dtype), of codes if the shape has them."""
    if not width:
        return None
    whole = batch, shape.kv_heads, keys, width
    if shape.codes is None:
        return whole, dtype
    return QuantizedEntries(
        (whole, jnp.dtype(shape.codes)), ((*whole[:3], 1), jnp.float32)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", named(DECODE))
def test_decode_attention(chip, name, dtype):
    shape = DECODE[name]

    def attend(query, key, value, at, positions, shared):
        if shared is not None:
            shared = SharedKeys(*shared, shape.members)
        sinks = jnp.zeros(shape.heads) if shape.sinks else None
        return decode_attention(
            query, OwnKeys(key, value, positions), at, shared=shared,
            scoring=Scoring(shape.window, None, shape.softcap, sinks),
        )  # fmt: skip

    shared, groups = None, 0
    if shape.members:
        groups = -(-shape.batch // shape.members)
        sizes = groups, shape.shared
        widths = shape.head_dim, shape.value_dim
        common = [entries(shape, dtype, *sizes, width) for width in widths]
        shared = *common, (sizes, jnp.int32), ((shape.batch,), jnp.int32)
    own = shape.batch, shape.own
    text = compiled(
        chip,
        attend,
        ((shape.batch, shape.queries, shape.heads, shape.head_dim), dtype),
        entries(shape, dtype, *own, shape.head_dim),
        entries(shape, dtype, *own, shape.value_dim),
        ((shape.batch, shape.queries), jnp.int32),
        (own, jnp.int32),
        shared,
    )
    assert calls(text, "decode_attention") == 1 + (shared is not None)
    # No array of keys is copied, not even to be laid out otherwise.
    if name not in ("odd", "views of 16"):
        for each in {f"{shape.own},{shape.head_dim}", f"{shape.head_dim},{shape.own}"}:
            assert not re.search(rf"= \w+\[\d+,\d+,{each}\]\S* (copy|pad)\(", text)


@pytest.mark.parametrize("name", named(DECODE))
def test_write_entries(chip, name):
    shape = DECODE[name]
    new = shape.queries if shape.queries < 16 else 1
    old, fresh = (
        tuple(
            entries(shape, jnp.bfloat16, shape.batch, keys, width)
            for width in (shape.head_dim, shape.value_dim)
            if width
        )
        for keys in (shape.own, new)
    )
    text = compiled(chip, write_entries, old, fresh, ((shape.batch, new), jnp.int32))
    # XLA stores in 1,037 keys, which are no whole number of blocks.
    assert calls(text, "write_entries") == (name != "odd")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", named(TOKEN_LOGPROB))
def test_token_logprob(chip, name, dtype):
    shape = TOKEN_LOGPROB[name]

    def both_passes(hidden, weight, targets, mask, kept, towards):
        def run(hidden, weight):
            return tuple(
                token_logprob(
                    hidden,
                    weight,
                    targets,
                    mask=mask,
                    kept=kept if shape.kept else None,
                    scaling=Scaling(softcap=shape.softcap),
                    implementation="auto",
                )
            )

        found, pull = jax.vjp(run, hidden, weight)
        return found, pull((towards, towards, towards))

    rows = (1, shape.rows)
    text = compiled(
        chip,
        both_passes,
        ((*rows, shape.width), dtype),
        ((shape.vocab, shape.width), dtype),
        (rows, jnp.int32),
        (rows, jnp.bool_),
        ((*rows, max(1, shape.kept)), jnp.int32),
        (rows, jnp.float32),
    )
    for kernel in ("forward", "hidden", "weight"):
        assert calls(text, f"token_logprob_{kernel}") == 1
    # No array holds a logit for every row and vocabulary entry.
    assert not re.search(rf"\[{shape.rows},{shape.vocab}\]", text)
    assert not re.search(rf"\[{shape.vocab},{shape.rows}\]", text)


@pytest.mark.parametrize(
    ("compile_one", "kernels", "name", "mebibytes"),
    [
        (test_token_logprob, token_logprob_tpu, "deepseek-v3, tp8", 40),
        pytest.param(
            *(test_attention, attention_tpu, "llama-3.3-70b, tp8", 23), marks=EVERY
        ),
        pytest.param(
            *(test_token_logprob, token_logprob_tpu, "llama-3.1-8b", 42), marks=EVERY
        ),
        pytest.param(*(test_attention, attention_tpu, "gemma-2-9b", 11), marks=EVERY),
    ],
)
def test_how_much_vmem_a_kernel_needs(
    monkeypatch, compile_one, kernels, name, mebibytes
):
    """The compiler may give 60 MiB to token_logprob, and 56 to attention.

    A v5p has 64. docs/explanation/kernels.md has all numbers, to 2 MiB.
    """
    plan.load()
    found = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices[0]
    chip = Mesh([found], ("dp",), axis_types=(AxisType.Auto,))
    monkeypatch.setattr(kernels, "VMEM_BYTES", mebibytes * 2**20)
    compile_one(chip, name, jnp.bfloat16)
    jax.clear_caches()
    monkeypatch.setattr(kernels, "VMEM_BYTES", (mebibytes - 4) * 2**20)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        compile_one(chip, name, jnp.bfloat16)


@EVERY
def test_the_guide_has_the_schedules():
    """libtpu reads what it writes once a process, so that another process runs."""
    command = [sys.executable, "-m", "benchmarks.rooflines.schedules", "llama-3.1-8b"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rows = [line for line in ended.stdout.splitlines() if "llama-3.1-8b" in line]
    assert len(rows) == 2
    guide = (ROOT / "docs" / "explanation" / "kernels.md").read_text().splitlines()
    assert [row for row in rows if row not in guide] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", named(NEXT_TOKEN))
def test_next_token(chip, name, dtype):
    shape = NEXT_TOKEN[name]
    text = compiled(
        chip,
        functools.partial(next_token, softcap=shape.softcap),
        ((shape.rows, shape.width), dtype),
        ((shape.vocab, shape.width), dtype),
        ((shape.rows,), jnp.float32),
        ((shape.rows,), jnp.float32),
    )
    for kernel in ("statistics", "logits"):
        assert calls(text, f"next_token_{kernel}") == 1
    assert not logits_in_memory(text, shape.rows, shape.vocab)
    # The matrix is read where it lies.
    assert not re.search(rf"\[{shape.vocab},{shape.width}\]\S* (copy|pad)\(", text)


def logits_in_memory(text: str, rows: int, vocab: int) -> bool:
    """Whether an array has a logit of every row, in any order."""
    return any(f"[{sizes}]" in text for sizes in (f"{rows},{vocab}", f"{vocab},{rows}"))


# Model, slice and mesh; what a device holds of the vocabulary; the largest array with
# this dimension in MiB: the gradient of the head's matrix in float32, such as
# 4 x 75,968 x 896 bytes. Logits would take 593.5 there, 4 x 2,048 x 75,968 bytes.
STEPS = [
    # Two layers of it, which a loop computes as it does all.
    ("qwen2.5-0.5b", 2, "v5e:2x2", "dp2,tp2", 151_936 // 2, 259.7),
    *(
        pytest.param(*step, marks=EVERY)
        for step in (
            ("qwen2.5-0.5b", 24, "v5e:2x2", "dp2,tp2", 151_936 // 2, 259.7),
            ("llama-3.1-8b", 32, "v5e:4x4", "fsdp8,tp2", 128_256 // 2, 1002.0),
            ("llama-3.3-70b", 80, "v5p:4x4x4", "fsdp8,tp8", 128_256 // 8, 501.0),
        )
    ),
]


@pytest.mark.parametrize(
    ("model", "layers", "topology", "mesh", "vocab", "largest"), STEPS
)
def test_a_train_step_takes_the_kernels(
    tmp_path, model, layers, topology, mesh, vocab, largest
):
    """The step of `launch.grpo`: attention and log-probs are the kernels."""
    length = 2048
    folder = tmp_path / "model"
    folder.mkdir()
    config = dataclasses.replace(PRESETS[model], num_layers=layers)
    (folder / "config.json").write_text(json.dumps(write_config(config)))
    arguments = [
        f"--model={folder}", f"--topology={topology}", f"--mesh={mesh}",
        f"--row-tokens={length}", "--scan-layers", f"--hlo={tmp_path / 'hlo'}",
    ]  # fmt: skip
    assert plan.main(arguments) == 0
    (text,) = (
        file.read_text()
        for file in (tmp_path / "hlo").iterdir()
        if "accumulate" in file.name
    )
    # Rematerialisation computes the forward pass twice.
    assert calls(text, "attention_forward") == 2
    assert calls(text, "attention_query") == calls(text, "attention_key") == 1
    for kernel in ("forward", "hidden", "weight"):
        assert calls(text, f"token_logprob_{kernel}") == 1
    assert not re.search(rf"\[(?:1,)?{length},{vocab}\]", text)
    mebibytes = max(arrays_of(text, vocab)) / 2**20
    assert mebibytes == pytest.approx(largest, abs=0.05)


def arrays_of(text: str, size: int) -> set[int]:
    """Bytes of a program's arrays with a dimension of this size."""
    found = set()
    for bits, numbers in set(re.findall(r"\b[a-z]+(\d+)\[([\d,]+)\]", text)):
        sizes = [int(number) for number in numbers.split(",")]
        if size in sizes:
            found.add(math.prod(sizes) * int(bits) // 8)
    return found


def sampling_programs(heads, dim, **rollout):
    """The programs of a sampler on four devices, and the mesh."""
    plan.load()
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    mesh = create_mesh("dp2,tp2", devices)
    architecture = ModelConfig(
        "qwen2", 32_000, 512, 1024, 2,
        num_heads=4 * heads, num_kv_heads=heads, head_dim=dim, max_length=8192,
        qkv_bias=True,
    )  # fmt: skip
    planned = PlannedRollout(prompts_per_step=8, **rollout)
    sampler = make_sampler(
        PlanConfig(model="", topology="v5e:2x2", rollout=planned), architecture, mesh
    )
    assert sampler is not None
    return sampler.programs((), ()), mesh


def program_text(program, mesh):
    with jax.set_mesh(mesh):
        traced = program.function.trace(*program.arguments, **program.static)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "view", "cache_dtype"),
    [
        (2, 128, 512, 512, "int8"),
        # Views of a length that was not chosen for the kernels.
        (2, 64, 1500, 1536, None),
        pytest.param(2, 64, 512, 512, None, marks=EVERY),
        pytest.param(16, 128, 4010, 4096, None, marks=EVERY),
        pytest.param(2, 128, 512, 512, None, marks=EVERY),
        pytest.param(2, 128, 1000, 1024, None, marks=EVERY),
        pytest.param(2, 128, 1660, 1664, "int8", marks=EVERY),
    ],
)
def test_a_decoding_step_copies_no_cache(heads, dim, tokens, view, cache_dtype):
    """Keys and values are written and read in one layout, the whole burst long.

    And tokens are drawn without logits in memory.
    """
    # The last one has the largest view: 64 samples of so many tokens, on two parts.
    (*_, program), mesh = sampling_programs(
        heads, dim, max_prompt_tokens=512, max_tokens=tokens, cache_dtype=cache_dtype
    )
    text = program_text(program, mesh)
    loop = "\n".join(loop_lines(text))
    # Own and shared keys of two layers; keys and values of a layer.
    assert calls(loop, "decode_attention") == 4
    assert calls(loop, "write_entries") == 2
    for sizes in (f"{view},{dim}", f"{dim},{view}"):
        cache = rf"= \w+\[32,{heads // 2},{sizes}\]\S* "
        assert not re.search(rf"{cache}(?:copy|pad|transpose|fusion|scatter)\(", loop)
    assert f"[32,{heads // 2},{view},{dim}]" in loop or dim % 128
    for kernel in ("statistics", "logits"):
        assert calls(loop, f"next_token_{kernel}") == 1
    # A device has half of the samples and half of the vocabulary.
    assert not logits_in_memory(text, 32, 16_000)


# Heads of keys and of values, their widths, and whether by the delta rule.
STEPS = {
    "qwen3.5-9b": (16, 32, 128, 128, True),
    "nemotron-3-nano": (8, 64, 128, 64, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_linear_attention_reads_and_writes_a_state_once(chip, name):
    key_heads, heads, key_dim, value_dim, delta = STEPS[name]
    rows, sharding = 64, jax.NamedSharding(chip, jax.P())

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    tokens = LinearInputs(
        array(rows, 1, key_heads, key_dim),
        array(rows, 1, key_heads, key_dim),
        array(rows, 1, heads, value_dim),
        array(rows, 1, heads),
        array(rows, 1, heads) if delta else None,
    )
    state = array(rows, heads, key_dim, value_dim)
    with jax.set_mesh(chip):
        traced = jax.jit(linear_step, donate_argnums=1).trace(tokens, state)
        made = traced.lower(lowering_platforms=("tpu",)).compile()
    text, memory = made.as_text(), made.memory_analysis()
    assert text is not None
    assert "linear_step" in text
    # The kernel's states are the program's own, and no copy of them is made.
    assert memory.alias_size_in_bytes == 4 * math.prod(state.shape)
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 8


def test_a_chunk_of_any_length_compiles():
    """464 keys are no whole number of blocks."""
    programs, mesh = sampling_programs(2, 64, max_prompt_tokens=400, max_tokens=64)
    (program,) = [each for each in programs if each.name.endswith(" x 464")]
    assert calls(program_text(program, mesh), "write_entries") == 0


def test_a_loss_of_log_probs_needs_no_kernel():
    """PPO's surrogate, a KL and their gradient are one pass over the tokens."""
    plan.load()
    found = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    chip = Mesh([found], ("dp",), axis_types=(AxisType.Auto,))

    def loss(policy, proximal, reference, advantages, mask):
        clip = {"clip_low": 0.2, "clip_high": 0.28}
        surrogate = clipped_surrogate(policy, proximal, advantages, mask, **clip)
        return token_mean(surrogate + 0.01 * k3(policy, reference, mask), mask).mean()

    tokens = (8, 8192), jnp.float32
    text = compiled(
        chip, jax.value_and_grad(loss), *[tokens] * 4, (tokens[0], jnp.bool_)
    )
    # The other one counts the mask.
    assert len(re.findall(r" fusion\(", text[text.index("\nENTRY") :])) == 2


@pytest.mark.parametrize(
    ("weights", "code"),
    [("int8", "s8"), pytest.param("float8", "f8e4m3fn", marks=EVERY)],
)
def test_a_decoding_step_reads_a_byte_a_weight(weights, code):
    """The codes are widened in the product, not written in bfloat16."""
    plan.load()
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    mesh = create_mesh("dp2,tp2", devices)
    architecture = ModelConfig(
        "qwen2", 32_000, 2048, 8192, 1,
        num_heads=16, num_kv_heads=4, head_dim=128, max_length=2048, qkv_bias=True,
    )  # fmt: skip
    rollout = PlannedRollout(
        prompts_per_step=8, max_prompt_tokens=512, max_tokens=512, weights=weights
    )
    sampler = make_sampler(
        PlanConfig(model="", topology="v5e:2x2", rollout=rollout), architecture, mesh
    )
    assert sampler is not None
    *_, program = sampler.programs((), ())
    with jax.set_mesh(mesh):
        traced = program.function.trace(*program.arguments, **program.static)
        text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    loop = "\n".join(loop_lines(text))
    # Gate, up and down; a device has half of them.
    for shape in ("2048,4096", "4096,2048"):
        assert f"{code}[{shape}]" in loop
        assert not re.search(rf"(?:bf16|f32)\[{shape}\]", loop)


def loop_lines(text: str) -> Iterator[str]:
    """The lines of a program's text that stand in the body of a loop."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    assert bodies
    inside = False
    for line in text.splitlines():
        begin = re.match(r"%([\w.\-]+) \(", line)
        inside = begin[1] in bodies if begin else inside
        if inside:
            yield line
