"""The XLA options without which a compiler undoes the delay. Set by the library for every program on a mesh.

What each is for, on GPUs (JAX 0.10.2 and 0.12.0):

- `xla_gpu_all_reduce_combine_threshold_bytes = 0`: by default sums of different layers are merged into one, which then
  waits for the last of them.
- `xla_gpu_experimental_parallel_collective_overlap_limit`: by default one sum is in flight at a time, so that the next
  one's start waits for the last one's end. With a delay of d modules there are up to d.
- `xla_gpu_pgle_profile_file_or_directory_path`: the scheduler starts a sum only as early as it believes necessary. It
  takes the latency to be worth five elementwise fusions, half a layer here, and puts off the start of a sum whose
  operand has long been there. The profile (`targets/sum_latency.pbtxt`) tells it that sums take a millisecond, so that
  each starts where its operand is born. It names instructions, which a new XLA may call otherwise: the sums then
  overlap less, nothing breaks, and the compile-only tests fail.
- `xla_gpu_pgle_accuracy_checker = OFF`: no warning for each of the instructions that the profile does not name.

TPUs and CPUs take none: a TPU's compiler keeps the sums apart by itself, a CPU's does not overlap them.
"""

from pathlib import Path

from jax.sharding import Mesh

LATENCY_PROFILE = Path(__file__).parent / "targets" / "sum_latency.pbtxt"
MOST_IN_FLIGHT = 64

CompilerOptions = dict[str, str | bool | int]

OPTIONS: dict[str, CompilerOptions] = {
    "gpu": {
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        "xla_gpu_experimental_parallel_collective_overlap_limit": MOST_IN_FLIGHT,
        "xla_gpu_pgle_profile_file_or_directory_path": str(LATENCY_PROFILE),
        "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_OFF",
    }
}


def compiler_options(mesh: Mesh) -> CompilerOptions:
    """The options for programs on the devices of `mesh`; none for one lane group, which exchanges nothing."""
    platform = str(mesh.devices.flat[0].platform)
    return dict(OPTIONS.get({"cuda": "gpu", "rocm": "gpu"}.get(platform, platform), {})) if mesh.size > 1 else {}
