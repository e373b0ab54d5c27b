"""Eight CPU devices, strict type promotion, and shape checks for every test."""

import atexit
import gc
import itertools
import os
import sys

# Both must be set before jax starts a backend, and so before any other import. Most of
# the time of the tests goes to compiling, so LLVM does not optimise: a third less time.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 "
    + os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from tests import compiled, durations, typecheck

jax.config.update("jax_numpy_dtype_promotion", "strict")

# A program that an earlier test or an earlier run compiled is not compiled again.
_CACHE = compiled.borrow()
atexit.register(compiled.give_back, _CACHE)
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Programs that tests start have a cache of their own, or none: by themselves they would
# write to the user's. Workers of the tests inherit this, so they need the first update.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# How long an example takes is the machine's affair, and the first one compiles. The
# examples are the same in every run, so that a test that passes keeps passing.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
typecheck.skip_what_is_not_annotated()
install_import_hook(typecheck.modules(), f"{typecheck.__name__}.checked")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write {durations.RECORD.name} anew, if all tests pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Once a session, in the process that hands out the tests."""
    if not hasattr(config, "workerinput"):
        compiled.make_room()
        if config.getoption("record_durations"):
            config.pluginmanager.register(durations.Recorder())


def pytest_collection_finish() -> None:
    """Lets garbage collection leave out what stays, and come less often.

    Tracing makes many objects that reference counts free.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# Acts that the running test may not do, by the audit events of Python.
_STARTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}
_unmarked: str | None = None


def _refuse_processes(event: str, arguments: tuple) -> None:
    # In this order: at the end of the process all that is global is None.
    if _unmarked is not None and event in _STARTS:
        raise AssertionError(
            f"{_unmarked} starts a process ({event} {arguments[0]}); mark it with "
            "pytest.mark.processes, so that `make quick` leaves it out"
        )


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Refuses processes in other tests if tests that start them are left out."""
    global _unmarked
    left_out = "not processes" in item.config.option.markexpr
    _unmarked = item.nodeid if left_out else None
    try:
        return (yield)
    finally:
        _unmarked = None


@pytest.fixture(scope="module", autouse=True)
def _let_go():
    """Half an hour of tests compiles more than a process may keep."""
    yield
    compiled.let_go()


_tests = itertools.count()


@pytest.fixture(autouse=True)
def _let_go_within_a_file():
    """Counting the regions takes up to 20 ms, so every fourth test does it."""
    yield
    if next(_tests) % 4 == 3:
        compiled.let_go(compiled.MOST_WITHIN_A_FILE)


@pytest.fixture(autouse=True)
def _restore_mesh():
    """Unsets the mesh that a test has set."""
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)


@pytest.fixture(autouse=True)
def _forget_modules(tmp_path_factory: pytest.TempPathFactory):
    """Forgets modules of a test's own folder: another test may use their names."""
    before = len(sys.modules)
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for name in [*itertools.islice(sys.modules, before, None)]:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]
