import itertools

import pytest
import toy

from laneformer_jax.errors import UsageError
from laneformer_jax.schedule import PACKS, format_schedule, make_schedule

# Three layers of four lanes, a line per module: kind, factor of the own output or "sum" where all lanes' sum of this
# very output takes its place, the module whose deferred sum arrives (- for none), and whether the output is sent.
DELAYED = {
    0: ["attention sum - sends", "mlp sum - sends"] * 3,
    1: [
        "attention 2 - sends",
        "mlp 1 0 sends",
        "attention 1 1 sends",
        "mlp 1 2 sends",
        "attention 1 3 sends",
        "mlp 1 4 -",
    ],
    2: [
        "attention 2 - sends",
        "mlp 2 - sends",
        "attention 1 0 sends",
        "mlp 1 1 sends",
        "attention 1 2 -",
        "mlp 1 3 -",
    ],
    3: [
        "attention 2 - sends",
        "mlp 2 - sends",
        "attention 2 - sends",
        "mlp 1 0 -",
        "attention 1 1 -",
        "mlp 1 2 -",
    ],
    4: [
        "attention 2 - sends",
        "mlp 2 - sends",
        "attention 2 - -",
        "mlp 2 - -",
        "attention 1 0 -",
        "mlp 1 1 -",
    ],
}
EARLY = {
    1: ["attention sum - sends", *DELAYED[1][1:]],
    2: ["attention sum - sends", "mlp sum - sends", *DELAYED[2][2:]],
    # Modules 2 and 3 are summed at once although no later module needs them.
    4: ["attention sum - sends", "mlp sum - sends", "attention sum - sends", "mlp sum - sends", *DELAYED[4][4:]],
}
ATTENTION_ONLY = {
    0: ["attention sum - sends", "mlp 2 - -"] * 3,
    # With an odd delay the sender's kind counts: MLP modules receive what attention sent.
    1: ["attention 2 - sends", "mlp 1 0 -", "attention 2 - sends", "mlp 1 2 -", "attention 2 - sends", "mlp 1 4 -"],
    2: [
        "attention 2 - sends",
        "mlp 2 - -",
        "attention 1 0 sends",
        "mlp 2 - -",
        "attention 1 2 -",
        "mlp 2 - -",
    ],
}
MLP_ONLY = {
    0: ["attention 2 - -", "mlp sum - sends"] * 3,
    1: ["attention 2 - -", "mlp 2 - sends", "attention 1 1 -", "mlp 2 - sends", "attention 1 3 -", "mlp 2 - -"],
    2: [
        "attention 2 - -",
        "mlp 2 - sends",
        "attention 2 - -",
        "mlp 1 1 sends",
        "attention 2 - -",
        "mlp 1 3 -",
    ],
}
NONE = {delay: ["attention 2 - -", "mlp 2 - -"] * 3 for delay in range(5)}
CASES = [
    (delay, switches, table)
    for switches, tables in [
        ({}, DELAYED),
        ({"early_comm": True}, EARLY),
        ({"mlp_comm": False}, ATTENTION_ONLY),
        ({"attention_comm": False}, MLP_ONLY),
        ({"attention_comm": False, "mlp_comm": False}, NONE),
    ]
    for delay, table in tables.items()
]


def config(delay: int, num_lanes: int = 4, num_layers: int = 3, **switches: bool):
    return toy.BASE.replace(delay=delay, num_lanes=num_lanes, num_layers=num_layers, sliding_layers=(), **switches)


@pytest.mark.parametrize(("delay", "switches", "table"), CASES)
def test_literal_tables(delay, switches, table):
    steps = make_schedule(config(delay, **switches))
    assert all(s.sums in ((), (s.module,)) for s in steps)
    lines = [
        f"{s.kind} {'sum' if s.sum_now else f'{s.own_scale:g}'} "
        f"{'-' if s.receive_from is None else s.receive_from} {'sends' if s.sums else '-'}"
        for s in steps
    ]
    assert lines == table
    assert [(s.module, s.layer) for s in steps] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_own_scale_keeps_the_variance_of_a_sum_over_the_lanes_there_are():
    scales = [make_schedule(config(2, num_lanes=lanes))[0].own_scale for lanes in (1, 2, 8)]
    assert scales == [1, 2**0.5, 8**0.5]


@pytest.mark.parametrize("pack", PACKS)
def test_what_is_needed_is_sent_once_and_in_time_and_nothing_else(pack):
    switches = itertools.product(range(9), range(1, 5), [False, True], [False, True], [False, True])
    for delay, num_layers, attention, mlp, early in switches:
        case = config(delay, num_layers=num_layers, attention_comm=attention, mlp_comm=mlp, early_comm=early)
        steps = make_schedule(case, pack)
        issued = {module: s.module for s in steps for module in s.sums}
        assert len(issued) == sum(len(s.sums) for s in steps)
        needed = {s.module if s.sum_now else s.receive_from: s.module for s in steps}
        needed.pop(None, None)
        assert issued.keys() == needed.keys()
        assert all(module <= issued[module] <= needed[module] for module in issued)
        assert all(s.receive_from in (None, s.module - delay) and not (s.sum_now and s.receive_from) for s in steps)


@pytest.mark.parametrize(
    ("delay", "switches", "sums"),
    [
        (0, {}, [(0,), (1,), (2,), (3,), (4,), (5,)]),
        (1, {}, [(0,), (1,), (2,), (3,), (4,), ()]),
        (2, {}, [(), (0, 1), (), (2, 3), (), ()]),
        (2, {"early_comm": True}, [(0,), (1,), (), (2, 3), (), ()]),
        (2, {"mlp_comm": False}, [(0,), (), (2,), (), (), ()]),
        (3, {}, [(), (0, 1), (2,), (), (), ()]),
        (4, {}, [(), (0, 1), (), (), (), ()]),
    ],
)
def test_literal_sums_when_a_layer_packs_its_two_outputs(delay, switches, sums):
    plain, packed = (make_schedule(config(delay, **switches), pack) for pack in PACKS)
    assert [s.sums for s in packed] == sums
    assert [(s.own_scale, s.sum_now, s.receive_from) for s in packed] == [
        (s.own_scale, s.sum_now, s.receive_from) for s in plain
    ]


def test_unknown_pack_is_refused():
    with pytest.raises(UsageError, match="pack must be one of module, layer, got 'all'"):
        make_schedule(config(2), "all")  # type: ignore[arg-type]


def test_table_for_people_has_a_line_for_every_module():
    header, *lines = format_schedule(make_schedule(config(2, early_comm=True))).splitlines()
    assert header.split() == "module layer kind lane adds receives from issues a sum of".split()
    assert [" ".join(line.split()) for line in lines] == [
        "0 0 attention sum over lanes - module 0",
        "1 0 mlp sum over lanes - module 1",
        "2 1 attention 1 x own output module 0 module 2",
        "3 1 mlp 1 x own output module 1 module 3",
        "4 2 attention 1 x own output module 2 -",
        "5 2 mlp 1 x own output module 3 -",
    ]
