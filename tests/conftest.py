"""Eight CPU devices, strict type promotion, and shape checks for every test."""

import os

# Both must be set before jax starts a backend, hence before any other import.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jaxtyping import install_import_hook

from tests import typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")
install_import_hook("jaxrl_post", f"{typecheck.__name__}.checked")
