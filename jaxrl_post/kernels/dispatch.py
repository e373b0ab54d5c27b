"""Chooses the implementation of an operation by platform.

A Pallas kernel runs on the platform that it is written for, and "auto" takes it there;
everywhere else it takes the XLA program. An implementation that is asked for by name is
taken or refused, never replaced.
"""

import functools
import logging
import re
from collections.abc import Mapping
from typing import Literal, cast, get_args

import jax
from jax.typing import DTypeLike

__all__ = [
    "PLATFORMS",
    "Implementation",
    "choose",
    "multiply_as_float32",
    "platform",
    "without_gpu_kernel",
]

Implementation = Literal["auto", "xla", "pallas_tpu", "pallas_gpu", "reference"]
Platform = Literal["cpu", "gpu", "hopper", "tpu"]

_log = logging.getLogger(__name__)
# The platform of each Pallas implementation, and the dtypes that it computes with. The
# tensor cores of a GPU multiply float32 as TensorFloat-32, which has 10 bits.
PLATFORMS: dict[Implementation, Platform] = {
    "pallas_tpu": "tpu",
    "pallas_gpu": "hopper",
}
DTYPES: dict[Implementation, tuple[str, ...]] = {
    "pallas_tpu": ("bfloat16", "float32"),
    "pallas_gpu": ("bfloat16",),
}
HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
TPU_KERNEL: dict[Implementation, str | None] = {"pallas_tpu": None}


def platform() -> Platform:
    """Platform for which a program is traced now.

    It is the platform of the devices of the mesh of `jax.set_mesh`, which need not
    exist, or without a mesh of JAX's default backend. "hopper" is a GPU of NVIDIA's
    Hopper family, "gpu" any other one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.devices()[0]
    kind = device.device_kind
    if kind.lower() == "cpu" or kind.lower().startswith("tpu"):
        return cast("Platform", kind.lower()[:3])
    return "hopper" if HOPPER.search(kind) else "gpu"


def choose(
    operation: str,
    wanted: Implementation,
    dtype: DTypeLike,
    *,
    kernels: Mapping[Implementation, str | None] = TPU_KERNEL,
    interpret: bool = False,
) -> Implementation:
    """The implementation that computes an operation here, never "auto".

    Args:
        operation: name of the public function, for errors and the log.
        wanted: an implementation, or "auto".
        dtype: of the operands.
        kernels: the operation's Pallas kernels, each with why it cannot compute this
            call; None if it can.
        interpret: whether a Pallas kernel is interpreted, on any platform.

    Raises:
        ValueError: `wanted` is unknown, or does not run here with this dtype or these
            shapes.

    >>> choose("attention", "auto", "bfloat16") if platform() == "cpu" else "xla"
    'xla'
    """
    if wanted not in get_args(Implementation):
        raise ValueError(
            f"{operation}: implementation must be one of {get_args(Implementation)}; "
            f"got {wanted!r}"
        )
    here, name = platform(), jax.numpy.dtype(dtype).name
    if wanted == "auto":
        own: Implementation | None = next(
            (kernel for kernel in kernels if PLATFORMS[kernel] == here), None
        )
        if own is None:
            _tell(operation, "xla", here, name, "")
            return "xla"
        problem = kernels[own]
        if name not in DTYPES[own]:
            problem = f"it computes with {' or '.join(DTYPES[own])}"
        taken: Implementation = own if problem is None else "xla"
        _tell(operation, taken, here, name, f"{own}: {problem}" if problem else "")
        return taken
    _require_platform(operation, wanted, here, interpret=interpret)
    if wanted not in PLATFORMS:
        return wanted
    if wanted not in kernels:
        raise ValueError(
            f"{operation}: there is no {wanted}; take 'auto', 'xla' or one of "
            f"{tuple(kernels)}"
        )
    if name not in DTYPES[wanted]:
        raise ValueError(
            f"{operation}: {wanted} computes with {' or '.join(DTYPES[wanted])}; got "
            f"{name}, which 'xla' and 'reference' take"
        )
    if (problem := kernels[wanted]) is not None:
        raise ValueError(
            f"{operation}: {wanted} cannot compute this: {problem}. 'xla' can"
        )
    return wanted


def multiply_as_float32(dtype: DTypeLike) -> None:
    """Makes this process multiply float32 as float32 on accelerators, too.

    JAX's default rounds the factors: to 10 bits on NVIDIA's GPUs (TensorFloat-32), to 8
    on TPUs. What the user chose, as with JAX_DEFAULT_MATMUL_PRECISION, stands.

    Args:
        dtype: of a model's parameters; with any but float32 nothing changes.
    """
    chosen = jax.config.jax_default_matmul_precision
    if jax.numpy.dtype(dtype) == "float32" and platform() != "cpu" and chosen is None:
        jax.config.update("jax_default_matmul_precision", "highest")


def without_gpu_kernel(
    operation: str, wanted: Implementation, dtype: DTypeLike, *, interpret: bool = False
) -> Implementation:
    """`wanted` for an operation that has no kernel for GPUs: "xla" for "pallas_gpu".

    So that one name serves a whole model. It is said once.

    Raises:
        ValueError: "pallas_gpu" is wanted, and this is no Hopper GPU.
    """
    if wanted != "pallas_gpu":
        return wanted
    here = platform()
    _require_platform(operation, wanted, here, interpret=interpret)
    _tell(operation, "xla", here, jax.numpy.dtype(dtype).name, "")
    return "xla"


def _require_platform(
    operation: str, wanted: Implementation, here: Platform, *, interpret: bool
) -> None:
    where = PLATFORMS.get(wanted, here)
    if where == here or interpret:
        return
    # An option of a command line cannot interpret a kernel.
    debugs = "" if operation.startswith("-") else "; interpret=True debugs it anywhere"
    raise ValueError(
        f"{operation}: {wanted} runs on {where}, and this program is for {here}. "
        f"Take 'auto' or 'xla'{debugs}"
    )


@functools.cache
def _tell(operation: str, taken: str, here: str, dtype: str, why: str) -> None:
    """Says once what "auto" took, where there is a choice: a program shows it.

    Args:
        why: why this platform's kernel was not taken; "" if it was, or there is none.
    """
    level = logging.WARNING if why else logging.INFO
    if here != "cpu":
        why = f", not {why}" if why else ""
        _log.log(level, "%s: %s on %s for %s%s", operation, taken, here, dtype, why)
