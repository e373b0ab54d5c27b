"""Fixtures that several tests of the learner share."""

from collections.abc import Iterator

import jax
import pytest

from jaxrl_post.sharding import create_mesh


@pytest.fixture
def one_device() -> Iterator[None]:
    """Models are made on one device, even if a test set a mesh before."""
    before = jax.sharding.get_mesh()
    jax.set_mesh(create_mesh("dp1", jax.devices()[:1]))
    yield
    jax.set_mesh(before)
