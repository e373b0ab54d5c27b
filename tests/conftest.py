"""Eight CPU devices, strict type promotion, and shape checks for every test."""

import atexit
import os

# Both must be set before jax starts a backend, hence before any other import.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

from tests import compiled, typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A program that an earlier test or an earlier run compiled is not compiled again.
_CACHE = compiled.borrow()
atexit.register(compiled.give_back, _CACHE)
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
install_import_hook("jaxrl_post", f"{typecheck.__name__}.checked")


def pytest_configure(config: pytest.Config) -> None:
    """Once a session, in the process that hands out the tests."""
    if not hasattr(config, "workerinput"):
        compiled.make_room()


@pytest.fixture(autouse=True)
def _restore_mesh():
    """What a test sets as the mesh is not there for the next."""
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)
