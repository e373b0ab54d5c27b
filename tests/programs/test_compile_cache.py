"""Compiled programs are kept for the next start; a failing cache ends nothing."""

import io
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.paths import check_paths
from jaxrl_post.config.run import CompileCacheConfig, RunConfig
from jaxrl_post.programs.build.compile_cache import (
    compile_cache,
    directory_of,
    make_room,
)
from launch.names import PROGRAMS, program_of

FOUND, WRITTEN = (f"/jax/compilation_cache/cache_{each}" for each in ("hits", "misses"))
INPUTS = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
_events: list[str] = []
jax.monitoring.register_event_listener(lambda event, **_: _events.append(event))


def start(path: Path | str, *, text: io.StringIO | None = None):
    """Returns what a start computes, and how many programs it found and wrote."""
    _events.clear()
    jax.clear_caches()
    console = Console(file=text or io.StringIO(), width=1000)
    with compile_cache(CompileCacheConfig(str(path)), {}, console):
        # Named, so that the name of their files is known.
        def wave(x):
            return jnp.sin(x) @ x.T + 1 / 3

        def sums(x):
            return jnp.exp(x).sum(axis=0) / 7

        found = [np.asarray(jax.jit(f)(INPUTS)) for f in (wave, sums)]
    return found, _events.count(FOUND), _events.count(WRITTEN)


def programs(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*-cache")}


def test_the_next_start_finds_what_was_compiled(tmp_path):
    first, found, written = start(tmp_path / "of" / "mine")
    assert (found, written) == (0, 2)
    kept = programs(tmp_path / "of" / "mine")
    assert sorted(name.rpartition("-")[0][:8] for name in kept) == [
        "jit_sums",
        "jit_wave",
    ]
    again, found, written = start(tmp_path / "of" / "mine")
    assert (found, written) == (2, 0)
    assert programs(tmp_path / "of" / "mine") == kept
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"garbage" * 1000,
        lambda whole: whole[:99] + bytes([whole[99] ^ 255]) + whole[100:],
    ],
    ids=["empty", "half", "garbage", "one byte"],
)
def test_damaged_programs_are_compiled_and_written_anew(tmp_path, caplog, damage):
    first, *_ = start(tmp_path)
    kept = programs(tmp_path)
    for name, whole in kept.items():
        (tmp_path / name).write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        again, found, written = start(tmp_path)
    np.testing.assert_equal(again, first)
    assert (found, written) == (0, 2)
    [told] = caplog.messages
    assert told.startswith(
        f"--compile-cache.path: a program in {tmp_path} cannot be read ("
    )
    assert start(tmp_path)[1:] == (2, 0)
    assert programs(tmp_path).keys() == kept.keys()


def test_a_disk_that_fills_costs_one_warning(tmp_path, caplog):
    """A file that may not grow is what a full disk looks like to a writer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    text = io.StringIO()
    config = CompileCacheConfig(str(tmp_path))
    with (
        caplog.at_level(logging.WARNING),
        compile_cache(config, {}, Console(file=text)),
    ):
        jax.clear_caches()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            for function in (jnp.sinh, jnp.cosh):
                jax.jit(function)(INPUTS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [told] = caplog.messages
    assert f"a program in {tmp_path} cannot be written (OSError: [Errno 27]" in told
    assert not text.getvalue()


def test_a_place_that_cannot_be_a_directory_leaves_no_cache(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        ("zero\0byte", "mkdir: embedded null"),
    ):
        text = io.StringIO()
        computed, found, written = start(path, text=text)
        assert (found, written) == (0, 0)
        assert computed[0].shape == (3, 3)
        told = text.getvalue()
        assert told.startswith("--compile-cache.path: ")
        assert f"cannot be written ({reason}" in told, told
        assert "give another directory, or off to have no cache" in told


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user that is not root")
def test_a_read_only_directory_leaves_no_cache(tmp_path):
    tmp_path.chmod(0o500)
    text = io.StringIO()
    assert start(tmp_path / "below", text=text)[1:] == (0, 0)
    assert "cannot be written (Permission denied)" in text.getvalue()


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    text = io.StringIO()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert start("auto", text=text)[1:] == (0, 0)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "there is no directory for a cache (Could not" in text.getvalue()


def test_what_the_user_told_jax_is_left_as_it_is(tmp_path):
    """As in the tests themselves, whose cache is JAX's own."""
    names = (
        "jax_compilation_cache_dir",
        "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_enable_xla_caches",
    )
    before = [getattr(jax.config, name) for name in names]
    with compile_cache(CompileCacheConfig(), {}, Console()) as folder:
        assert folder == Path(jax.config.jax_compilation_cache_dir)
        assert [getattr(jax.config, name) for name in names] == before
    given = CompileCacheConfig(str(tmp_path))
    with compile_cache(given, {}, Console()) as folder:
        assert folder == tmp_path
        assert [getattr(jax.config, name) for name in names] == [
            str(tmp_path), True, 0, "none",
        ]  # fmt: skip
    assert [getattr(jax.config, name) for name in names] == before
    with compile_cache(CompileCacheConfig("off"), {}, Console()) as folder:
        assert folder is None
        assert not jax.config.jax_enable_compilation_cache
    assert [getattr(jax.config, name) for name in names] == before


def test_how_long_a_kept_program_compiles_is_the_environments(tmp_path):
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    environment = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "3"}
    with compile_cache(CompileCacheConfig(str(tmp_path)), environment, Console()):
        assert jax.config.jax_persistent_cache_min_compile_time_secs == before


def test_the_directory_is_the_users(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane"))
    usual = Path("/home/jane/.cache/jaxrl_post/xla")
    assert directory_of("auto", {}) == usual
    assert directory_of("auto", {"XDG_CACHE_HOME": "relative"}) == usual
    assert directory_of("mine", {}) == Path("mine").absolute()


def test_above_the_bound_the_programs_not_used_for_longest_go(tmp_path):
    for age, name in enumerate(["newest", "older", "read", "oldest"]):
        file = tmp_path / f"jit_{name}-{64 * 'a'}-cache"
        file.write_bytes(bytes(10))
        # Read an hour after it was written.
        os.utime(file, (9000 - age + 3600 * (name == "read"), 9000 - age))
    others = tmp_path / "my-cache"
    others.write_bytes(bytes(1000))
    os.utime(others, (0, 0))
    make_room(tmp_path, 40)
    # By name: to read a file here would be a use of it.
    assert len(os.listdir(tmp_path)) == 5
    make_room(tmp_path, 20)
    assert {name[:10] for name in os.listdir(tmp_path)} == {
        "jit_newest", "jit_read-a", "my-cache",
    }  # fmt: skip
    make_room(tmp_path / "nowhere", 0)


def test_the_bound_holds_from_the_start(tmp_path):
    start(tmp_path)
    config = CompileCacheConfig(str(tmp_path), max_gib=1e-9)
    with compile_cache(config, {}, Console()):
        assert not programs(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "--compile-cache.path: is empty; give a directory, auto or off"),
        ("gs://bucket/x", "must be a directory .*; got 'gs://bucket/x'. Drop the op"),
    ],
)
def test_what_is_no_directory_is_refused(path, message):
    with pytest.raises(ConfigError, match=message):
        check_paths(RunConfig(compile_cache=CompileCacheConfig(path)))


@pytest.mark.processes
def test_a_program_keeps_what_it_compiles_below_the_users_cache(tmp_path):
    """The second start compiles nothing, and its answers are the same."""
    left_out = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment |= {
        "XDG_CACHE_HOME": str(tmp_path / "user"),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    kept, answers = [], []
    for number in range(2):
        output = tmp_path / f"{number}.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "launch.evaluate", "--model=demo"),
                *("--env=arithmetic?level=0", "--num-tasks=2", "--max-tokens=2"),
                f"--output={output}",
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            timeout=300,
            check=True,
        )
        kept.append(programs(tmp_path / "user" / "jaxrl_post" / "xla"))
        answers.append(output.with_suffix(".completions.jsonl").read_text())
    assert kept[0]
    assert kept[1] == kept[0]
    assert answers[1] == answers[0]


def test_programs_that_compile_have_the_option_and_others_do_not():
    configs = {name: program_of(name).default([]) for name in PROGRAMS}
    without = {
        name for name, each in configs.items() if not hasattr(each, "compile_cache")
    }
    assert without == {"convert", "doctor", "plan", "redteam", "report", "watch"}
