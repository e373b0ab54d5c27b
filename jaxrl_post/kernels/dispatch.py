"""Which implementation of an operation runs on which platform.

A Pallas kernel runs on the platform that it is written for, and "auto" takes it there;
everywhere else it takes the XLA program. An implementation that is asked for by name is
taken or refused, never replaced.
"""

import functools
import logging
from typing import Literal, cast, get_args

import jax
from jax.typing import DTypeLike

__all__ = ["Implementation", "choose", "platform"]

Implementation = Literal["auto", "xla", "pallas_tpu", "reference"]
Platform = Literal["cpu", "gpu", "tpu"]

_log = logging.getLogger(__name__)
# The platform of each Pallas implementation, and the dtypes that it computes with.
PLATFORMS: dict[Implementation, Platform] = {"pallas_tpu": "tpu"}
DTYPES = ("bfloat16", "float32")


def platform() -> Platform:
    """Platform for which a program is traced now.

    It is that of the devices of the mesh of `jax.set_mesh`, which need not exist, or
    without a mesh that of JAX's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        found = jax.default_backend()
        return cast("Platform", "gpu" if found in ("cuda", "rocm") else found)
    kind = device.device_kind.lower()
    return "tpu" if kind.startswith("tpu") else "cpu" if kind == "cpu" else "gpu"


def choose(
    operation: str,
    wanted: Implementation,
    dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> Implementation:
    """The implementation that computes an operation here, never "auto".

    Args:
        operation: name of the public function, for errors and the log.
        wanted: an implementation, or "auto".
        dtype: of the operands.
        interpret: whether a Pallas kernel is interpreted, on any platform.

    Raises:
        ValueError: `wanted` is unknown, or does not run here with this dtype.

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
        wanted = "xla"
        for kernel, where in PLATFORMS.items():
            if where == here and name in DTYPES:
                wanted = kernel
        _tell(operation, wanted, here, name)
        return wanted
    where = PLATFORMS.get(wanted, here)
    if where != here and not interpret:
        raise ValueError(
            f"{operation}: {wanted} runs on {where}, and this program is for {here}. "
            "Take 'auto' or 'xla'; interpret=True debugs it anywhere"
        )
    if wanted in PLATFORMS and name not in DTYPES:
        raise ValueError(
            f"{operation}: {wanted} computes with {' or '.join(DTYPES)}; got {name}, "
            "which 'xla' and 'reference' take"
        )
    return wanted


@functools.cache
def _tell(operation: str, taken: str, here: str, dtype: str) -> None:
    _log.info("%s: %s on %s for %s", operation, taken, here, dtype)
