"""Meshes that cannot be are refused."""

import jax
import pytest
import toy

from laneformer_jax.errors import LaneformerError, UsageError
from parallel import distributed, make_mesh
from parallel.mesh import check_mesh


@pytest.mark.parametrize("sizes", [(0,), (-1,), (1.5,), ("8",), (None,), (8, 0)])
def test_sizes_of_a_mesh_are_positive_whole_numbers(sizes):
    with pytest.raises(UsageError, match="a mesh takes whole numbers of at least 1, got "):
        make_mesh(*sizes)


def test_other_meshes_and_what_is_none_are_refused():
    for mesh in (8, jax.make_mesh((1, 8), ("a", "b"))):
        with pytest.raises(LaneformerError, match="the mesh must have the axes .* as parallel.make_mesh gives, got "):
            check_mesh(mesh, toy.BASE)
    with pytest.raises(LaneformerError, match="3 devices do not divide the model's 8 lanes"):
        check_mesh(make_mesh(3), toy.BASE)


@pytest.mark.parametrize("coordinator", ["", "host", "host:", "host:port", "host:65536", ":80"])
def test_a_coordinator_is_a_host_and_a_port(coordinator):
    with pytest.raises(UsageError, match="--coordinator must be HOST:PORT with a port below 65536, got "):
        distributed.join(coordinator, 2, 0)
