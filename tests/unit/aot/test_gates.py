"""Which gates a topology has."""

import pytest

from jdisagg.aot.accelerators import parse_topology, read_accelerators
from jdisagg.aot.gates import TOPOLOGIES, cases

KINDS = [f"{kind.name}:{kind.smallest}" for kind in read_accelerators().values()]


@pytest.mark.parametrize("extent", ["few", "steps", "all"])
@pytest.mark.parametrize("text", [*KINDS, *TOPOLOGIES, "v6e:1x1", "h200:8"])
def test_every_topology_has_gates_that_fit_on_it(text: str, extent: str) -> None:
    topology = parse_topology(text)
    wanted = list(cases(extent, topology))
    assert wanted
    assert all(case.tp <= topology.num_devices and case.topology == str(topology) and case.steps for case in wanted)
