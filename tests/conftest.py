"""Eight CPU devices, strict type promotion, and shape checks for every test."""

import atexit
import os
import shutil
import tempfile

# Both must be set before jax starts a backend, hence before any other import.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

from tests import typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A program that an earlier test compiled is not compiled again. The directory belongs
# to this process alone: two writers of a file could disturb each other.
_CACHE = tempfile.mkdtemp(prefix="compiled-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
install_import_hook("jaxrl_post", f"{typecheck.__name__}.checked")


@pytest.fixture(autouse=True)
def _restore_mesh():
    """What a test sets as the mesh is not there for the next."""
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)
