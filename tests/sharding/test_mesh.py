"""Meshes by name: what is read, what is refused and how devices are laid out."""

import jax
import numpy as np
import pytest

from jaxrl_post.sharding import MeshError, create_mesh, parse_mesh


@pytest.mark.parametrize(
    ("spec", "devices", "sizes"),
    [
        ("", 8, (8, 1, 1)),
        ("dp8", 8, (8, 1, 1)),
        ("tp8", 8, (1, 1, 8)),
        ("dp2,tp4", 8, (2, 1, 4)),
        ("tp4,dp2", 8, (2, 1, 4)),
        (" dp=2 , fsdp=2,tp2 ", 8, (2, 2, 2)),
        ("fsdp-1", 8, (1, 8, 1)),
        ("tp2,fsdp-1", 8, (1, 4, 2)),
        ("tp8,dp-1", 8, (1, 1, 8)),
        ("dp1", 1, (1, 1, 1)),
        ("dp4,tp8", 32, (4, 1, 8)),
    ],
)
def test_a_mesh_that_fits(spec, devices, sizes):
    parsed = parse_mesh(spec, devices)
    dp, fsdp, tp = sizes
    assert parsed == {"pp": 1, "dp": dp, "fsdp": fsdp, "ep": 1, "cp": 1, "tp": tp}
    assert list(parsed) == ["pp", "dp", "fsdp", "ep", "cp", "tp"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp", r"cannot read 'dp' in 'dp'; write axis and size, as in 'dp4,tp8'"),
        ("dp4;tp2", r"cannot read 'dp4;tp2'"),
        ("dp4,,tp2", r"cannot read '' in 'dp4,,tp2'"),
        ("dp2.5", r"cannot read 'dp2\.5'"),
        ("xp8", r"unknown axis 'xp' in 'xp8'; axes are pp, dp, fsdp, ep, cp, tp"),
        ("dp2,dp4", r"axis 'dp' stands twice in 'dp2,dp4'"),
        ("dp0,tp8", r"size of 'dp' must be positive, or -1 for all .*; got 0 in"),
        ("dp-2,tp8", r"size of 'dp' must be positive, or -1 for all .*; got -2 in"),
        ("dp-1,tp-1", r"only one size may be -1; got 'dp-1,tp-1'"),
        ("dp4,tp4", r"'dp4,tp4' needs 16 devices, but there are 8; .*_count=16"),
        ("dp2", r"'dp2' needs 2 devices, but there are 8"),
        ("dp-1,tp3", r"'dp-1,tp3' needs a multiple of 3 devices, but there are 8"),
        ("dp-1,tp16", r"needs a multiple of 16 devices, but there are 8"),
    ],
)
def test_a_mesh_that_does_not(spec, message):
    with pytest.raises(MeshError, match=rf"^mesh: .*{message}"):
        parse_mesh(spec, 8)


def test_tensor_parallel_devices_are_neighbours():
    mesh = create_mesh("tp2,dp2,fsdp2")
    assert mesh.axis_names == ("pp", "dp", "fsdp", "ep", "cp", "tp")
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(1, 2, 2, 1, 1, 2))
    assert {axis.name for axis in mesh.axis_types} == {"Auto"}


def test_a_mesh_over_some_of_the_devices():
    chosen = jax.devices()[2:6]
    mesh = create_mesh("tp-1", chosen)
    assert dict(mesh.shape) == {"pp": 1, "dp": 1, "fsdp": 1, "ep": 1, "cp": 1, "tp": 4}
    assert list(mesh.devices.flat) == chosen
