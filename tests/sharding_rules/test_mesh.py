import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

from sharding_rules import make_mesh, split_axis
from tests.devices import eight


def test_make_mesh_takes_the_first_devices_with_auto_axes():
    mesh = make_mesh(data=2, model=3)
    assert dict(mesh.shape) == {"data": 2, "model": 3}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert list(mesh.devices.flat) == eight()[:6]


def test_make_mesh_takes_given_devices():
    assert list(make_mesh(model=2, devices=eight()[5:]).devices.flat) == eight()[5:7]


def test_make_mesh_with_too_few_devices_says_how_many_and_how_to_get_virtual_ones():
    eight()
    with pytest.raises(ValueError, match=r"needs 16 devices and there are 8.*xla_force_host_platform_device_count=16"):
        make_mesh(data=2, model=8)
    with pytest.raises(ValueError, match="at least 1"):
        make_mesh(data=0)


def test_a_split_axis_keeps_neighbours_together():
    split = split_axis(make_mesh(data=2, model=4), "model", 2)
    assert dict(split.shape) == {"data": 2, "model_batch": 2, "model": 2}
    ids = np.vectorize(lambda device: device.id)(split.devices)
    assert ids.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_splitting_an_abstract_mesh_gives_an_abstract_mesh_with_auto_axes(kind):
    split = split_axis(AbstractMesh((3, 8, 5), ("a", "b", "c"), axis_types=(kind,) * 3), "b", 4)
    assert isinstance(split, AbstractMesh)
    assert dict(split.shape) == {"a": 3, "b_batch": 2, "b": 4, "c": 5}
    assert split.axis_types == (AxisType.Auto,) * 4


def test_a_split_that_does_not_divide_or_whose_name_is_taken_is_an_error():
    eight()
    with pytest.raises(ValueError, match="cannot split mesh axis 'model'"):
        split_axis(make_mesh(model=8), "model", 3)
    with pytest.raises(ValueError, match="'model_batch'"):
        split_axis(Mesh(np.array(eight()).reshape(2, 4), ("model_batch", "model")), "model", 2)
