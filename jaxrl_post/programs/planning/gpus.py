"""Clusters of NVIDIA GPUs that need not exist: descriptions for their compiler.

The plugin that `jax[cuda12]` brings holds the compiler for GPUs. Given the facts of a
GPU and the shape of a cluster it compiles on any machine. It does not refuse a program
that is too large for the memory.
"""

import importlib.metadata
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from jaxrl_post.config.plan import PlanError
from jaxrl_post.programs.planning.chips import KINDS, nodes_of

__all__ = ["GPUS", "Gpu", "cluster_devices", "plugin", "target_config"]

# Plugins with the compiler, one for each version of CUDA.
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@dataclass(frozen=True)
class Gpu:
    """Facts that the compiler must know of a GPU.

    Attributes:
        capability: major version of CUDA's compute capability.
        processors: number of streaming multiprocessors.
        clock_ghz: their highest clock.
        l2_bytes: of the L2 cache.
        memory_gib: of the memory that CUDA reports, some GiB less than the vendor's.
        bandwidth: bytes per second of the memory.
    """

    capability: int
    processors: int
    clock_ghz: float
    l2_bytes: int
    memory_gib: float
    bandwidth: float


# By `device_kind`; SXM. XLA's own descriptions have the same facts
# (xla/backends/gpu/target_config/specs), but for the memory of an H200, which is the
# one that CUDA reports.
GPUS = {
    "NVIDIA H100 80GB HBM3": Gpu(9, 132, 1.98, 50 * 2**20, 79.11, 3352.32e9),
    "NVIDIA H200": Gpu(9, 132, 1.98, 50 * 2**20, 139.80, 4800e9),
    "NVIDIA B200": Gpu(10, 148, 1.965, 132644864, 178.36, 7672.32e9),
}


def target_config(kind: str) -> str:
    """A GPU's description for XLA, `stream_executor.GpuTargetConfigProto` as text.

    Args:
        kind: its `device_kind`, a key of `GPUS`.
    """
    gpu = GPUS[kind]
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {gpu.capability} }}
  core_count: {gpu.processors} clock_rate_ghz: {gpu.clock_ghz}
  fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: {gpu.l2_bytes}
  device_memory_size: {int(gpu.memory_gib * 2**30)}
  memory_bandwidth: {int(gpu.bandwidth)}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 12 minor: 9 }}
"""


def plugin() -> str | None:
    """Name of the installed distribution with the compiler; None if there is none."""
    found = [name for name in PLUGINS if importlib.util.find_spec(name) is not None]
    return found[0].replace("_", "-") if found else None


def cluster_devices(topology: str) -> list[Any]:
    """Descriptions of the GPUs of a cluster, node by node; it need not exist.

    Args:
        topology: such as h100:8x8.

    Raises:
        PlanError: the topology cannot be read, or the compiler is not installed.
    """
    nodes = nodes_of(topology)
    assert nodes is not None, topology
    if plugin() is None:
        version = jax.__version__
        raise PlanError(
            "jax_cuda12_plugin is not installed. It holds the compiler for GPUs and "
            "needs none. Give it a folder of its own, since with it JAX looks for a "
            "GPU wherever it starts: pip install --no-deps --target build/kernels/gpu "
            f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} "
            "nvidia-cuda-nvcc-cu12, then PYTHONPATH=build/kernels/gpu python -m "
            "launch.plan ... . Or give --no-compile"
        )
    kind = KINDS[topology.partition(":")[0]]
    shape = "x".join(map(str, (1, *nodes)))
    found = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(kind), topology=shape
    )
    assert len(found.devices) == math.prod(nodes)
    return list(found.devices)
