"""Tells a run that exhausts the devices' memory what takes it, and how to lower it."""

import contextlib
from collections.abc import Iterator

import jax

from jaxrl_post.learner.memory import MemoryTable

__all__ = ["REMEDIES", "OutOfMemoryError", "memory_errors"]

# Options that lower each row of `learner.memory.layout_table`.
REMEDIES = {
    "parameters": "--mesh with fsdp, pp or tp over more devices, --dtype bfloat16",
    "adapter": "a smaller --lora.rank",
    "optimizer": "--mesh with fsdp over more devices, --optimizer.moment-dtype "
    "bfloat16, --optimizer.name adafactor, or --lora.rank 16 (an adapter)",
    "gradients": "--mesh with fsdp over more devices, or --lora.rank 16 (an adapter)",
    "reference": "--lora.rank 16 (the base under an adapter is the reference)",
    "critic": "--critic.backbone shared, or --critic.lora.rank",
    "prm": "--prm.lora.rank",
    "reward model": "a smaller --reward.model",
    "sampler's copy": "the mesh of --mesh for --rollout.mesh, or "
    "--rollout.weights int8",
    "KV cache": "fewer --rollout.num-slots, a smaller --rollout.max-tokens, or "
    "--rollout.cache-dtype int8",
    "draft model": "no --rollout.draft or --rollout.mtp",
    "activations": "fewer --update.microbatch-tokens, --update.remat full, or --mesh "
    "with tp or cp",
}


class OutOfMemoryError(RuntimeError):
    """The devices had too little memory."""


@contextlib.contextmanager
def memory_errors(table: MemoryTable) -> Iterator[None]:
    """Turns an exhausted memory into an error that names the options that lower it.

    Args:
        table: what takes memory; it may be filled later.

    Raises:
        OutOfMemoryError: instead of JAX's RESOURCE_EXHAUSTED.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        said = str(error)
        if isinstance(error, jax.errors.JaxRuntimeError) and (
            "RESOURCE_EXHAUSTED" not in said
        ):
            raise
        raise OutOfMemoryError(_told(said, table)) from error


def _told(said: str, table: MemoryTable) -> str:
    sizes = [
        (float(size.replace(",", "")), name)
        for name, _, size in table
        if name in REMEDIES
    ]
    lines = [
        f"  {name}, {size:,.1f} MiB a device: {REMEDIES[name]}"
        for size, name in sorted(sizes, reverse=True)
    ]
    first = said.strip().partition("\n")[0] or "no memory is left"
    if not lines:
        options = "--mesh with fsdp or tp over more devices, or --dtype bfloat16"
        return f"out of memory while the model was opened ({first}). Give {options}"
    return "\n".join(
        (
            f"out of memory ({first}). The last checkpoint is whole. What takes "
            "memory, and options that lower it:",
            *lines,
            "python -m launch.plan tells what fits before a run",
        )
    )
