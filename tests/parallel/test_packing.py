"""Which sums the schedule issues, and that the lowered program holds exactly those."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec
from tolerances import LOGITS_FLOAT32, ROUNDED_BFLOAT16

from laneformer_jax.config import laneformer_2b
from laneformer_jax.errors import UsageError
from laneformer_jax.lanes import Lanes
from laneformer_jax.schedule import make_schedule
from laneformer_jax.weights import abstract_model
from parallel import MeshEngine, make_mesh
from parallel.report import lower_decode

# Sums over lanes that the 2B model's 15 layers issue per token, by delay in layers and packing.
SUMS = {
    (0, "module"): 30,
    (0, "layer"): 30,
    (1, "module"): 28,
    (1, "layer"): 14,
    (2, "module"): 26,
    (2, "layer"): 13,
    (3, "module"): 24,
    (3, "layer"): 12,
    (4, "module"): 22,
    (4, "layer"): 11,
}
SILENT = laneformer_2b().replace(attention_comm=False, mlp_comm=False)
OTHERS = 1  # the sum before the head


def lowered_sums(config, pack):
    engine = MeshEngine(abstract_model(config), make_mesh(8), pack=pack)
    return lower_decode(engine, 1, 64).as_text().count("stablehlo.all_reduce") - OTHERS


@pytest.mark.parametrize(("delay", "pack"), SUMS)
def test_the_program_holds_exactly_the_sums_of_the_schedule(delay, pack):
    config = laneformer_2b().replace(delay=2 * delay)
    assert sum(bool(step.sums) for step in make_schedule(config, pack)) == SUMS[delay, pack]
    assert lowered_sums(config, pack) == SUMS[delay, pack]


@pytest.mark.parametrize("pack", ["module", "layer"])
def test_without_communication_nothing_is_summed(pack):
    assert not any(step.sums for step in make_schedule(SILENT, pack))
    assert lowered_sums(SILENT, pack) == 0


@pytest.mark.parametrize("pack", ["module", "layer"])
@pytest.mark.parametrize("delay", range(9))
@pytest.mark.parametrize(("attention", "mlp"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("early", [False, True])
def test_every_output_that_is_used_travels_once_and_in_time(pack, delay, attention, mlp, early):
    config = toy.BASE.replace(
        num_layers=6, delay=delay, attention_comm=attention, mlp_comm=mlp, early_comm=early, sliding_layers=()
    )
    steps = make_schedule(config, pack)
    issued = {module: step.module for step in steps for module in step.sums}
    assert sum(len(step.sums) for step in steps) == len(issued)
    used = {s.receive_from: s.module for s in steps if s.receive_from is not None}
    used |= {s.module: s.module for s in steps if s.sum_now}
    assert issued.keys() == used.keys()
    for module, at in issued.items():
        assert module <= at <= used[module]
        # Only what has a whole module's time left may wait for its layer's other output.
        assert at == module or used[module] > at or delay == 2
    if pack == "module":
        assert all(module == at for module, at in issued.items())


@pytest.mark.parametrize(("delay", "expected"), [(3, [(0, 1), (2, 3), (4, 5), (6, 7), (8,)]), (2, [(0, 1), (2, 3)])])
def test_a_layer_travels_together(delay, expected):
    steps = make_schedule(toy.BASE.replace(num_layers=6 if delay == 3 else 3, delay=delay), "layer")
    assert [step.sums for step in steps if step.sums] == expected


@pytest.mark.parametrize(
    ("delay", "lanes", "pack"), [(3, 1, "layer"), (1, 4, "module"), (3, 2, "module"), (3, 8, "layer")]
)
def test_odd_delays_on_a_mesh_are_the_single_devices(delay, lanes, pack):
    config = toy.BASE.replace(num_layers=3, delay=delay)
    engine = MeshEngine(toy.model(config), make_mesh(lanes), pack=pack)
    found = np.asarray(engine.logits(jnp.asarray(toy.ids(config))))
    assert np.abs(found - toy.logits(config)).max() < LOGITS_FLOAT32


@pytest.mark.parametrize(("sum_dtype", "tolerance"), [("float32", 1e-6), (None, 4 * ROUNDED_BFLOAT16)])
def test_sums_travel_in_the_dtype_that_was_asked_for(sum_dtype, tolerance):
    """Against float64: sums in float32 round there alone, those in bfloat16 up to eight times on their way."""
    outputs = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 8, 64)), jnp.bfloat16)
    exact = np.asarray(outputs, np.float64).sum(axis=2, keepdims=True)
    lanes = Lanes("lanes", sum_dtype=sum_dtype)
    split = PartitionSpec(None, None, "lanes")
    summed = jax.shard_map(lanes.sum, mesh=make_mesh(8), in_specs=split, out_specs=PartitionSpec())(outputs)
    assert summed.dtype == (sum_dtype or "bfloat16")
    error = np.abs(np.asarray(summed, np.float64) - exact).max() / np.abs(exact).max()
    assert error < tolerance
    assert sum_dtype == "float32" or error > 1e-6


@pytest.mark.parametrize("wrong", [{"pack": "pair"}, {"sum_dtype": "int8"}])
def test_choices_that_do_not_exist_are_refused(wrong):
    with pytest.raises(UsageError, match="must be one of"):
        MeshEngine(toy.model(), make_mesh(2), **wrong)
