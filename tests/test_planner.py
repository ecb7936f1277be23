"""The planner: never worse than the naive choices, the same topologies as `Topology.without`, bytes as `plan_reshard` counts them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from lightning_ntp.cost_model import CostModel, ModelShape
from lightning_ntp.errors import ConfigError, UnrecoverableError
from lightning_ntp.layout import nested_layouts
from lightning_ntp.model_spec import ParamSpec
from lightning_ntp.planner import further_losses, plan_placement, split_batch
from lightning_ntp.presets import GPUS, PAPER_MODEL
from lightning_ntp.reshard import plan_reshard
from lightning_ntp.topology import Replica, Topology
from tests.work import counted_calls

MODEL = ModelShape(4096, 32, 8, 14336, 32, 128_256, 4096)
COST = CostModel(MODEL, GPUS["h200"])
SMALL = ModelShape(hidden_size=24, num_heads=6, num_kv_heads=6, ffn_size=48, num_layers=1, vocab_size=60, sequence_length=8)


def finish(share: int, rows: int, seconds: float) -> float:
    return -(-share // rows) * seconds


class TestShares:
    @pytest.mark.parametrize(
        "rates", [[(1, 1.0), (1, 1.3)], [(2, 1.0), (1, 0.7), (1, 2.0)], [(3, 1.1), (2, 1.0)], [(1, 1.0)]]
    )
    @pytest.mark.parametrize("global_batch", [1, 5, 12])
    def test_no_split_is_done_sooner(self, rates: list[tuple[int, float]], global_batch: int) -> None:
        shares = split_batch(rates, global_batch)
        assert sum(shares) == global_batch and min(shares) >= 0
        best = min(
            max(finish(k, *rate) for k, rate in zip(split, rates, strict=True))
            for split in itertools.product(range(global_batch + 1), repeat=len(rates))
            if sum(split) == global_batch
        )
        assert max(finish(k, *rate) for k, rate in zip(shares, rates, strict=True)) == pytest.approx(best)

    def test_even_replicas_share_evenly(self) -> None:
        assert split_batch([(1, 0.3)] * 4, 64) == (16, 16, 16, 16)


class TestShapes:
    def test_nothing_lost_nothing_changes(self) -> None:
        topology = Topology.from_shapes([(2, 4), (2, 4)])
        placement = plan_placement(topology, COST, 64)
        assert placement.topology == topology and placement.moved_bytes == 0
        assert [plan.action for plan in placement.replicas] == ["keep", "keep"]

    @pytest.mark.parametrize("lost", [[5], [0], [5, 9], [5, 6], [7, 9, 4]])
    def test_shrinking_in_place_is_what_topology_without_does(self, lost: list[int]) -> None:
        topology = Topology.from_shapes([(1, 4)] * 3)
        planned, one_by_one = topology, topology
        for worker in lost:
            planned = plan_placement(planned, COST, 64, [worker], refactor=False).topology
            one_by_one = one_by_one.without(worker)
        assert planned == one_by_one

    def test_a_lost_role_costs_its_share_of_the_samples(self) -> None:
        placement = plan_placement(Topology.from_shapes([(1, 4), (1, 4)]), COST, 64, [5])
        kept, hurt = placement.replicas
        assert (kept.action, hurt.action, hurt.degree) == ("keep", "drop role", 3)
        assert sum(placement.shares) == 64 and hurt.samples < kept.samples
        assert hurt.sample_seconds > kept.sample_seconds and hurt.memory_bytes > kept.memory_bytes

    def test_rows_that_lost_different_roles_give_up_only_one(self) -> None:
        topology = Topology.from_shapes([(2, 4), (2, 4)])
        placement = plan_placement(topology, COST, 64, [8, 13], refactor=False)
        assert placement.replicas[1].degree == 3, "two columns are hit, but each row lost one worker"
        assert placement.topology.spares == ()

    def test_pure_fsdp_drops_a_row(self) -> None:
        placement = plan_placement(Topology.from_shapes([(8, 1), (8, 1)]), COST, 64, [3])
        assert (placement.replicas[0].action, placement.replicas[0].fsdp_size) == ("drop row", 7)

    def test_a_refactored_shape_uses_live_workers_once_and_stays_inside_domains(self) -> None:
        cost = replace(COST, exposed_tp=1.0)
        placement = plan_placement(Topology.from_shapes([(2, 4), (2, 4)]), cost, 64, [13])
        assert placement.replicas[1].action == "refactor"
        held = placement.topology.replicas[1].workers + placement.topology.spares
        assert sorted(held) == [8, 9, 10, 11, 12, 14, 15]
        kept = plan_placement(Topology.from_shapes([(2, 4), (2, 4)]), cost, 64, [13], refactor=False)
        assert kept.replicas[1].action != "refactor"
        wide = plan_placement(Topology.from_shapes([(2, 8)] * 2), cost, 64, [13])
        for row in wide.topology.replicas[0].grid:
            assert len({worker // 8 for worker in row}) == 1

    def test_a_replica_without_workers_is_dropped(self) -> None:
        placement = plan_placement(Topology.from_shapes([(1, 4), (1, 4)]), COST, 64, [4, 5, 6, 7])
        assert placement.dropped_replicas == 1 and placement.shares == (64,)
        assert placement.topology.loss_order == (3, 2, 1)

    def test_what_does_not_fit_is_not_chosen(self) -> None:
        tight = replace(COST, gpu=replace(COST.gpu, memory_bytes=COST.memory_bytes(4) / 0.9 + 1))
        placement = plan_placement(Topology.from_shapes([(1, 4), (1, 4)]), tight, 64, [5])
        assert placement.dropped_replicas == 1 and len(placement.topology.spares) == 3
        with pytest.raises(UnrecoverableError, match="with 2 workers lost no replica can hold the model"):
            plan_placement(Topology.from_shapes([(1, 4), (1, 4)]), tight, 64, [0, 5])

    def test_spares_of_the_domain_fill_the_hole(self) -> None:
        topology = Topology(3, (Replica(((0, 1, 2),)), Replica(((8, 9, 10),))), spares=(11, 30))
        placement = plan_placement(topology, COST, 64, [9])
        assert placement.topology.replicas[1].grid == ((8, 11, 10),)
        assert placement.topology.spares == (30,) and placement.replicas[1].action == "fill"

    def test_a_whole_spare_domain_stands_in(self) -> None:
        topology = Topology(3, (Replica(((0, 1, 2),)), Replica(((8, 9, 10),))), spares=(16, 17, 18, 19))
        placement = plan_placement(topology, COST, 64, [9])
        assert placement.topology.replicas[1].grid == ((16, 17, 18),)
        assert placement.topology.spares == (8, 10, 19)

    def test_packing_gathers_hurt_rows(self) -> None:
        topology = Topology.from_shapes([(2, 8)] * 4)
        lost = [3, 16 + 12]
        placement = plan_placement(topology, COST, 640, lost, refactor=False)
        assert placement.packed
        assert sorted(replica.degree for replica in placement.topology.replicas) == [7, 8, 8, 8]
        assert placement.step_seconds < placement.naive_step_seconds
        assert set(placement.topology.workers) | set(placement.topology.spares) == set(topology.workers) - set(lost)
        apart = plan_placement(topology, COST, 64, lost, refactor=False)
        assert not apart.packed and placement.moved_bytes < 1.05 * apart.moved_bytes, "rows kept their coordinates"

    def test_boost_lets_a_hurt_replica_keep_pace(self) -> None:
        topology = Topology.from_shapes([(1, 32)] * 2)
        cost = CostModel(PAPER_MODEL, GPUS["b200"], num_stages=8, domain_size=32)
        plain = plan_placement(topology, cost, 64, [5, 7], refactor=False)
        boosted = plan_placement(topology, cost, 64, [5, 7], refactor=False, boost=True)
        assert plain.replicas[0].power is not None and 1 < plain.replicas[0].power <= 1.3
        assert boosted.shares == (32, 32) and plain.shares[0] < 32
        assert boosted.step_seconds == pytest.approx(plan_placement(topology, cost, 64).step_seconds, rel=0.01)


class TestPromises:
    @pytest.mark.parametrize("seed", range(12))
    def test_never_worse_than_naive_and_nobody_is_forgotten(self, seed: int) -> None:
        rng = random.Random(seed)
        shape = rng.choice([(1, 4), (2, 4), (4, 2), (8, 1), (1, 8), (2, 8)])
        topology = Topology.from_shapes([shape] * rng.randint(2, 4))
        for _ in range(3):
            lost = rng.sample(topology.workers, rng.randint(1, 2))
            before = set(topology.workers) | set(topology.spares)
            placement = plan_placement(topology, COST, 64, lost)
            assert placement.step_seconds <= placement.naive_step_seconds * (1 + 1e-9)
            assert sum(placement.shares) == 64
            assert set(placement.topology.workers) | set(placement.topology.spares) == before - set(lost)
            assert placement == plan_placement(topology, COST, 64, lost[::-1])
            topology = placement.topology

    @pytest.mark.parametrize(
        ("shapes", "lost"),
        [([(1, 3)] * 2, [4]), ([(1, 3)] * 3, [4, 1]), ([(2, 3)] * 2, [7]), ([(2, 3)] * 2, [7, 10]), ([(2, 2)] * 2, [5, 6])],
    )
    def test_moved_bytes_are_those_of_the_reshard_plan(self, shapes: list[tuple[int, int]], lost: list[int]) -> None:
        cost = CostModel(SMALL, GPUS["h100"])
        old = Topology.from_shapes(shapes)
        new = plan_placement(old, cost, 12, lost, refactor=False).topology
        plan = plan_reshard(_params(old, new), old, new, lost)
        assert cost.moved_bytes(old, new) == plan.bytes(12)

    @pytest.mark.parametrize("block", range(4))
    def test_any_chain_of_losses_can_be_resharded_and_moves_what_was_said(self, block: int) -> None:
        for seed in range(20 * block, 20 * block + 20):
            rng = random.Random(seed)
            shape = rng.choice([(1, 3), (2, 3), (2, 2), (3, 2), (4, 1), (2, 6), (1, 6)])
            cost = CostModel(SMALL, GPUS["h100"], domain_size=rng.choice([shape[1], 8]), exposed_tp=rng.random())
            old = Topology.from_shapes([shape] * rng.randint(2, 4))
            while len(old.workers) > 4:
                lost = rng.sample(old.workers, rng.randint(1, 2))
                placement = plan_placement(old, cost, rng.choice([12, 96]), lost, refactor=rng.random() < 0.7)
                new = placement.topology
                params = _params(old, new)
                try:
                    plan = plan_reshard(params, old, new, lost)
                except UnrecoverableError:
                    break  # a region died with its last holder
                plan.validate(params, new)
                assert placement.moved_bytes == plan.bytes(12), (seed, old, lost, new)
                old = new

    def test_roles_kept_free_let_a_replica_go_on_over_all_its_workers(self) -> None:
        """2x4 that loses one goes on as 1x7, where neither 2x3, 1x4 nor 7x1 can hold the model."""
        narrow = replace(MODEL, num_heads=56, num_kv_heads=56, hidden_size=7168)
        cost = CostModel(narrow, GPUS["h200"])
        tight = replace(GPUS["h200"], memory_bytes=cost.memory_bytes(7) / 0.9)
        topology = Topology.from_shapes([(2, 4)] * 2, num_roles=7)
        placement = plan_placement(topology, CostModel(narrow, tight), 64, [3])
        assert [(r.fsdp_size, r.degree) for r in placement.topology.replicas] == [(1, 7), (2, 4)]
        assert placement.replicas[1].power == 1.0 and not placement.topology.spares

    def test_32768_gpus_take_few_calls(self) -> None:
        """The seconds are shown by `benchmarks/bench_planner.py`."""
        cost = CostModel(PAPER_MODEL, GPUS["b200"], domain_size=32)
        topology = Topology.from_shapes([(8, 32)] * 128)
        lost = random.Random(0).sample(range(32_768), 131)
        placement, num_calls = counted_calls(lambda: plan_placement(topology, cost, 81_920, lost, refactor=False))
        assert num_calls < 2_000_000
        assert placement.packed and sum(r.degree < 32 for r in placement.topology.replicas) <= 16

    def test_further_losses_only_get_dearer(self) -> None:
        placement = plan_placement(Topology.from_shapes([(1, 4), (1, 4)]), COST, 64)
        chain = further_losses(placement, COST, 64, 8)
        steps = [placement.step_seconds, *(each.step_seconds for each in chain)]
        assert steps == sorted(steps) and 3 <= len(chain) <= 7
        assert [len(each.topology.workers) + len(each.topology.spares) for each in chain[:2]] == [7, 6]

    def test_it_explains_itself(self) -> None:
        words = plan_placement(Topology.from_shapes([(1, 8)] * 4), COST, 64, [3]).explain()
        assert "1 x drop role: 1x7" in words and "3 x keep: 1x8" in words and "GB of state move" in words

    def test_bad_input(self) -> None:
        topology = Topology.from_shapes([(1, 4), (1, 4)])
        with pytest.raises(ConfigError, match=r"lost workers \[99\] are not in the topology of 8 workers"):
            plan_placement(topology, COST, 64, [99])
        with pytest.raises(ConfigError, match="global_batch must be a finite number above 0, got 0"):
            plan_placement(topology, COST, 0)


def _params(old: Topology, new: Topology) -> list[ParamSpec]:
    """The parameters of SMALL that tp cuts, with the layouts of the loss order of `new`."""
    shape, roles, order = SMALL, new.num_roles, new.loss_order
    heads = nested_layouts(shape.num_heads, roles, order).scaled(shape.head_size)
    ffn = nested_layouts(shape.ffn_size, roles, order)
    vocab = nested_layouts(shape.vocab_size, roles, order)
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_size
    return [
        *(ParamSpec(name, (width, hidden), 0, heads) for name in "qkv"),
        ParamSpec("o", (hidden, width), 1, heads),
        *(ParamSpec(name, (shape.ffn_size, hidden), 0, ffn) for name in ("gate", "up")),
        ParamSpec("down", (hidden, shape.ffn_size), 1, ffn),
        *(ParamSpec(name, (shape.vocab_size, hidden), 0, vocab) for name in ("embed", "head")),
    ]
