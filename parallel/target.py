"""Meshes of devices that are not there: their compilers run on any machine and give the program that they would run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from laneformer_jax.errors import LaneformerError, UsageError
from parallel.mesh import make_mesh

DESCRIPTIONS = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    Attributes:
        devices: number of them, all on one lanes axis.
        bytes_per_second: peak read bandwidth of one device's memory, from the maker's data sheet.
        collective_us: stated time of one sum of a few KB over all devices, in microseconds. For H200s that of a
            library all-reduce within one NVLink domain (docs/delay.md); for TPUs an assumption.
        platform: of JAX.
        topology: as that platform's compiler names it.
        description: file with the properties of the device, where the compiler needs one.
        package: what to install for it.
    """

    devices: int
    bytes_per_second: float
    collective_us: float
    platform: str
    topology: str
    description: str | None
    package: str

    def mesh(self) -> Mesh:
        """Its devices as a mesh of 1 x `devices`, on which programs can be compiled but not run.

        Raises:
            LaneformerError: the compiler is not installed; says what to install.
        """
        return make_mesh(self.devices, devices=list(self._devices()))

    def _devices(self) -> Sequence[Any]:
        try:
            if self.description is None:
                return topologies.get_topology_desc(self.topology, self.platform).devices
            text = (DESCRIPTIONS / self.description).read_text(encoding="utf-8")
            return topologies.get_topology_desc(
                self.description, self.platform, target_config=text, topology=self.topology
            ).devices
        except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
            raise LaneformerError(
                f"no compiler for {self.platform} devices here: pip install {self.package} ({error})"
            ) from error


def _h200(devices: int) -> Target:
    return Target(devices, 4.8e12, 8.0, "cuda", f"1x1x{devices}", "h200_sxm.txtpb", "'laneformer-jax[aot]'")


TARGETS = {
    "h200x8": _h200(8),
    "h200x1": _h200(1),
    "v5e-8": Target(8, 0.819e12, 8.0, "tpu", "v5e:2x4", None, "libtpu"),
}


def find_target(name: str) -> Target:
    """The target of that name.

    Raises:
        UsageError: there is none; lists those there are.
    """
    if name not in TARGETS:
        raise UsageError(f"no target {name!r}: choose one of {', '.join(TARGETS)}")
    return TARGETS[name]
