"""Checkpoints: exact, whole or absent, and free of the mesh that wrote them."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.data.prompts import task_indices
from jaxrl_post.learner.checkpoint import CheckpointError, Checkpoints, abstract_state
from jaxrl_post.learner.state import TrainState
from jaxrl_post.sharding import create_mesh


def make_state(value: float = 0.0, *, size: int = 8) -> TrainState:
    params = {"w": jnp.arange(size * 4.0).reshape(size, 4) + value, "b": jnp.ones(4)}
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    state = optax.adamw(1e-3).init(params)
    return TrainState(jnp.asarray(3, jnp.int32), narrow, params, state)


def layout_of(state: TrainState, mesh, spec: P) -> TrainState:
    def place(leaf):
        return NamedSharding(mesh, spec if leaf.ndim == 2 else P())

    return jax.tree.map(place, state)


def assert_equal(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.meshes
def test_state_iterator_and_meta_come_back_on_another_mesh(tmp_path):
    one, eight = create_mesh("", jax.devices()[:1]), create_mesh("pp2,fsdp2,tp2")
    state = make_state()
    state = jax.device_put(state, layout_of(state, one, P()))
    indices = task_indices(10, seed=1)
    drawn = [int(next(indices)) for _ in range(7)]
    assert len(set(drawn)) == 7
    checkpoints = Checkpoints(tmp_path / "c")
    meta = {"drawn": 7, "buffer": [{"logprob": -0.1234567}]}
    checkpoints.save(5, state, indices, meta)
    expected = [int(next(indices)) for _ in range(20)]
    checkpoints.wait()

    layout = layout_of(state, eight, P(("fsdp", "pp"), "tp"))
    again = task_indices(10, seed=1)
    shapes = jax.eval_shape(lambda: state)
    restored, restored_meta = checkpoints.restore(
        5, abstract_state(shapes, layout), again
    )
    assert_equal(restored, state)
    assert restored.params["w"].sharding == layout.params["w"]
    assert restored_meta == meta
    assert [int(next(again)) for _ in range(20)] == expected
    checkpoints.close()


def test_donating_the_state_right_after_save_does_not_change_what_is_saved(tmp_path):
    state = make_state(size=2**15)
    expected = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, state, task_indices(3, seed=0), {})
    bump = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for _ in range(5):
        state = bump(state)
    checkpoints.wait()
    one = create_mesh("", jax.devices()[:1])
    shapes = jax.eval_shape(lambda: expected)
    restored, _ = checkpoints.restore(
        1,
        abstract_state(shapes, layout_of(shapes, one, P())),
        task_indices(3, seed=0),
    )
    assert_equal(restored, expected)
    checkpoints.close()


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, make_state(step), task_indices(3, seed=0), {})
    checkpoints.wait()
    assert checkpoints.latest() == 4
    steps = sorted(p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit())
    assert steps == ["3", "4"]
    checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, make_state(), task_indices(3, seed=0), {})
    checkpoints.wait()
    other = make_state(size=16)
    one = create_mesh("", jax.devices()[:1])
    abstract = abstract_state(jax.eval_shape(lambda: other), layout_of(other, one, P()))
    with pytest.raises(
        CheckpointError,
        match=r"step 1 in .*master\.w is float32\[8, 4\], not float32\[16, 4\].*another"
        " model",
    ):
        checkpoints.restore(1, abstract, task_indices(3, seed=0))
    checkpoints.close()


# Orbax stops waiting for the other arrays once one has failed; their outcome is not
# seen.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    old = make_state(1.0)
    checkpoints.save(1, old, task_indices(3, seed=0), {})
    checkpoints.wait()
    larger = make_state(size=2**16)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save() -> None:
        checkpoints.save(2, larger, task_indices(3, seed=0), {})
        # Finds that the one before failed, and says so of that one.
        checkpoints.save(3, larger, task_indices(3, seed=0), {})

    # A file that may not grow is what a full disk looks like to a writer.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"of step 2 could not be written.*Step 1 is"
        ) as caught:
            save()
        assert "\n" not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    fresh = Checkpoints(tmp_path / "c")
    assert fresh.latest() == 1
    one = create_mesh("", jax.devices()[:1])
    restored, _ = fresh.restore(
        1,
        abstract_state(jax.eval_shape(lambda: old), layout_of(old, one, P())),
        task_indices(3, seed=0),
    )
    assert_equal(restored, old)
    fresh.close()
