"""Tests that compile for absent GPUs exist only where their compiler does (extra `aot`), so that none is ever skipped."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("jax_plugins.xla_cuda12") else ["aot"]
