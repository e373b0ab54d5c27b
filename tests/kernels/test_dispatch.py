"""Choice of an implementation, and refusals."""

import inspect
import io

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxrl_post.kernels import dispatch
from jaxrl_post.kernels.dispatch import (
    choose,
    multiply_as_float32,
    platform,
    without_gpu_kernel,
)
from jaxrl_post.kernels.token_logprob import token_logprob
from jaxrl_post.records.sinks import warnings_shown

# The kernels of an operation that has one for TPUs and one for Hopper GPUs.
BOTH = {"pallas_tpu": None, "pallas_gpu": None}


@pytest.fixture
def on(monkeypatch):
    """Makes programs be traced for another platform."""

    def become(name):
        monkeypatch.setattr(dispatch, "platform", lambda: name)

    return become


def test_the_platform_is_that_of_the_devices():
    assert platform() == "cpu"
    with jax.set_mesh(jax.make_mesh((2,), ("dp",))):
        assert platform() == "cpu"
        assert jax.jit(lambda x: x if platform() == "cpu" else -x)(1) == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("TPU v5 lite", "tpu"),
        ("TPU7x", "tpu"),
        ("NVIDIA H200", "hopper"),
        ("NVIDIA H100 80GB HBM3", "hopper"),
        ("NVIDIA GH200 480GB", "hopper"),
        ("NVIDIA A100-SXM4-80GB", "gpu"),
        ("NVIDIA B200", "gpu"),
        ("cpu", "cpu"),
    ],
)
def test_a_mesh_of_devices_that_are_not_here(monkeypatch, kind, expected):
    class Device:
        device_kind = kind

    class Mesh:
        abstract_device = Device

    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: Mesh)
    assert platform() == expected


def test_auto_takes_the_kernel_where_it_runs(on):
    assert choose("op", "auto", jnp.bfloat16) == "xla"
    on("tpu")
    assert choose("op", "auto", jnp.bfloat16) == "pallas_tpu"
    assert choose("op", "auto", jnp.float32) == "pallas_tpu"
    # No kernel computes with float16.
    assert choose("op", "auto", jnp.float16) == "xla"
    on("gpu")
    assert choose("op", "auto", jnp.bfloat16, kernels=BOTH) == "xla"
    on("hopper")
    assert choose("op", "auto", jnp.bfloat16) == "xla"
    assert choose("op", "auto", jnp.bfloat16, kernels=BOTH) == "pallas_gpu"
    assert choose("op", "auto", jnp.float32, kernels=BOTH) == "xla"
    too_wide = {"pallas_tpu": None, "pallas_gpu": "it is too wide"}
    assert choose("op", "auto", jnp.bfloat16, kernels=too_wide) == "xla"
    message = "op: pallas_gpu cannot compute this: it is too wide. 'xla' can"
    with pytest.raises(ValueError, match=message):
        choose("op", "pallas_gpu", jnp.bfloat16, kernels=too_wide)
    with pytest.raises(ValueError, match="op: there is no pallas_gpu; take 'auto', "):
        choose("op", "pallas_gpu", jnp.bfloat16)
    message = "op: pallas_gpu computes with bfloat16; got float32"
    with pytest.raises(ValueError, match=message):
        choose("op", "pallas_gpu", jnp.float32, kernels=BOTH)


def test_a_named_implementation_is_taken_or_refused(on):
    message = (
        r"op: pallas_tpu runs on tpu, and this program is for cpu\. Take 'auto' or "
        r"'xla'; interpret=True debugs it anywhere"
    )
    with pytest.raises(ValueError, match=message):
        choose("op", "pallas_tpu", jnp.float32)
    assert choose("op", "pallas_tpu", jnp.float32, interpret=True) == "pallas_tpu"
    # An option cannot interpret.
    with pytest.raises(ValueError, match=r"--kernels: .* Take 'auto' or 'xla'$"):
        choose("--kernels", "pallas_tpu", jnp.float32)
    on("tpu")
    assert choose("op", "xla", jnp.float32) == "xla"
    assert choose("op", "pallas_tpu", jnp.float32) == "pallas_tpu"
    message = "op: pallas_tpu computes with bfloat16 or float32; got float16, which "
    with pytest.raises(ValueError, match=message):
        choose("op", "pallas_tpu", jnp.float16)


def test_an_unknown_implementation_is_refused():
    # Without the tests' own check of types, which comes first.
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'XLA'"):
        inspect.unwrap(choose)("op", "XLA", jnp.float32)


def test_a_kernel_asked_for_on_the_wrong_platform_is_an_error_of_the_operation():
    hidden, weight = jnp.ones((1, 2, 3)), jnp.ones((4, 3))
    targets = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="token_logprob: pallas_tpu runs on tpu"):
        token_logprob(hidden, weight, targets, implementation="pallas_tpu")


def test_a_run_says_once_what_was_taken_and_why_not_the_kernel(on):
    dispatch._tell.cache_clear()
    shown = io.StringIO()
    too_wide = {"pallas_tpu": None, "pallas_gpu": "300 numbers a head"}
    with warnings_shown(Console(file=shown, width=200)):
        for here in ("cpu", "tpu", "hopper", "gpu"):
            on(here)
            for _ in range(3):
                choose("attention", "auto", jnp.bfloat16, kernels=too_wide)
                choose("next_token", "auto", jnp.bfloat16)
        on("hopper")
        choose("token_logprob", "auto", jnp.float32, kernels=BOTH)
    assert shown.getvalue().splitlines() == [
        "attention: pallas_tpu on tpu for bfloat16",
        "next_token: pallas_tpu on tpu for bfloat16",
        "attention: xla on hopper for bfloat16, not pallas_gpu: 300 numbers a head",
        "next_token: xla on hopper for bfloat16",
        "attention: xla on gpu for bfloat16",
        "next_token: xla on gpu for bfloat16",
        "token_logprob: xla on hopper for float32, not pallas_gpu: it computes with "
        "bfloat16",
    ]


def test_where_gpus_have_no_kernel_its_name_means_xla_on_them_alone(on):
    assert without_gpu_kernel("op", "xla", jnp.bfloat16) == "xla"
    assert without_gpu_kernel("op", "auto", jnp.bfloat16) == "auto"
    message = "op: pallas_gpu runs on hopper, and this program is for cpu"
    with pytest.raises(ValueError, match=message):
        without_gpu_kernel("op", "pallas_gpu", jnp.bfloat16)
    on("hopper")
    assert without_gpu_kernel("op", "pallas_gpu", jnp.float32) == "xla"


def test_float32_is_multiplied_as_float32_on_accelerators(on):
    before = jax.config.jax_default_matmul_precision

    def after(dtype, here, users=None):
        on(here)
        jax.config.update("jax_default_matmul_precision", users)
        multiply_as_float32(dtype)
        return jax.config.jax_default_matmul_precision

    try:
        assert after("float32", "hopper") == "highest"
        assert after(jnp.float32, "tpu") == "highest"
        assert after("float32", "gpu", users="default") == "default"
        assert after("bfloat16", "hopper") is None
        assert after("float32", "cpu") is None
    finally:
        jax.config.update("jax_default_matmul_precision", before)
