"""Laneformer's lanes on a mesh of devices."""

from parallel.engine import MeshEngine
from parallel.mesh import make_mesh

__all__ = ["MeshEngine", "make_mesh"]
