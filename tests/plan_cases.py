"""Topologies and parameter sets that the plan tests draw from."""

from hypothesis import strategies as st

from lightning_ntp.layout import nested_layouts
from lightning_ntp.model_spec import ParamSpec
from lightning_ntp.topology import Topology


def specs_for(topology, heads=6, group=2, ffn=7, hidden=6):
    """A small decoder layer: row-cut, column-cut, KV copies, replicated, partial."""
    order = topology.loss_order
    queries = nested_layouts(heads, topology.num_roles, order)
    columns = nested_layouts(ffn, topology.num_roles, order)
    keys = queries.grouped(group).scaled(4)
    return [
        ParamSpec("q.weight", (heads * 4, hidden), 0, queries.scaled(4)),
        ParamSpec("k.weight", (keys.size, hidden), 0, keys),
        ParamSpec("k.bias", (keys.size,), 0, keys),
        ParamSpec("o.weight", (hidden, heads * 4), 1, queries.scaled(4)),
        ParamSpec("up.weight", (ffn, hidden), 0, columns),
        ParamSpec("norm.weight", (hidden,)),
        ParamSpec("q_norm.weight", (4,), partial=True),
    ]


@st.composite
def topologies(draw, max_replicas=3, equal_fsdp=False):
    num_roles = draw(st.integers(1, 5))
    common = draw(st.integers(1, 3))
    count = draw(st.integers(1, max_replicas))
    shapes = [(common if equal_fsdp else draw(st.integers(1, 3)), draw(st.integers(1, num_roles))) for _ in range(count)]
    order = draw(st.permutations(range(num_roles)))[: num_roles - 1]
    return Topology.from_shapes(shapes, order, num_roles)
