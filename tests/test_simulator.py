"""The simulator against closed forms, the values of arXiv 2504.06095, and bad input."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_ntp import presets
from lightning_ntp.cluster import Cluster, FailureKind, Policy
from lightning_ntp.cost_model import CostModel, GpuSpec, ModelShape
from lightning_ntp.errors import ConfigError
from lightning_ntp.reliability import (
    SECONDS_PER_DAY,
    availability,
    checkpoint_efficiency,
    expected_hurt_domains,
    job_mttf_seconds,
    young_daly_seconds,
)
from lightning_ntp.scenarios import (
    DROP,
    NTP,
    NTP_PW,
    RecoveryCosts,
    availability_report,
    goodput_report,
    llama3_failures,
    loss_report,
    record_failures,
    scenario,
    trace_report,
)
from lightning_ntp.simulator import (
    Band,
    StepTable,
    Trace,
    capacity,
    goodput,
    monte_carlo,
    replica_degrees,
    sample_failed,
    simulate,
    simulate_trace,
    spare_domains_needed,
)
from tests.work import counted_calls

PAPER = scenario("ntp-paper")


class TestClosedForms:
    @pytest.mark.parametrize("size", [8, 16, 32, 64])
    def test_availability_of_drawn_states(self, size: int) -> None:
        rows = availability_report(32_768, (size,), (0.001, 0.004), samples=200)
        for row in rows:
            assert row["drawn_mean"] == pytest.approx(availability(row["failed_fraction"], size), abs=0.002)

    def test_hurt_domains_without_replacement(self) -> None:
        drawn = (sample_failed(PAPER.cluster, 131, 3, 400) > 0).sum(axis=1).mean()
        assert drawn == pytest.approx(expected_hurt_domains(131, 1024, 32), rel=0.01)

    def test_mean_time_between_failures_falls_with_the_number_of_gpus(self) -> None:
        gap = {}
        for num_gpus in (1024, 8192):
            trace = simulate_trace(Cluster(num_gpus, 8), [FailureKind("any", 0.01, (0.01,))], 100, seed=1)
            gap[num_gpus] = trace.end / trace.is_failure.sum()
            assert gap[num_gpus] == pytest.approx(job_mttf_seconds(100 * SECONDS_PER_DAY, num_gpus), rel=0.1)
        assert gap[1024] / gap[8192] == pytest.approx(8, rel=0.1)

    def test_steady_state_is_rate_times_repair_time(self) -> None:
        cluster, kind = Cluster(8192, 8), FailureKind("any", 0.002, (2.0,))
        trace = simulate_trace(cluster, [kind], 200, seed=0)
        settled = trace.times > 10 * SECONDS_PER_DAY
        mean = (trace.num_failed * trace.durations)[settled].sum() / trace.durations[settled].sum()
        assert mean == pytest.approx(8192 * 0.002 * 2.0, rel=0.05)

    def test_young_daly_is_the_best_interval_to_first_order(self) -> None:
        best = young_daly_seconds(60, 12_000)
        assert best == pytest.approx(1200)
        around = {i: checkpoint_efficiency(best * i, 60, 12_000, 300) for i in (0.7, 1.0, 1.4)}
        assert max(around, key=around.__getitem__) == 1.0

    @pytest.mark.parametrize("restart_seconds", [0.0, 900.0])
    def test_checkpoint_and_restart_wastes_what_the_closed_form_says(self, restart_seconds: float) -> None:
        kind = FailureKind("any", 0.5, (1e-6,))
        policy = Policy("restart", False, recovery_seconds=restart_seconds, checkpoint_seconds=60, interval_seconds=1800)
        trace = simulate_trace(Cluster(16, 8), [kind], 2000, seed=0)
        played = goodput(trace, np.ones(len(trace.times)), policy).goodput
        mttf = trace.end / trace.is_failure.sum()
        # a second failure may strike during a restart here, not in the closed form: restart / mttf of the restarts
        slack = (restart_seconds / mttf) ** 2
        assert played == pytest.approx(checkpoint_efficiency(1800, 60, mttf, restart_seconds), abs=0.002 + slack)

    def test_the_default_interval_is_young_daly(self) -> None:
        trace = simulate_trace(Cluster(16, 8), [FailureKind("any", 0.5, (1e-6,))], 500, seed=0)
        policy = Policy("restart", False, checkpoint_seconds=60)
        best = young_daly_seconds(60, trace.end / trace.is_failure.sum())
        ones = np.ones(len(trace.times))
        assert goodput(trace, ones, policy) == goodput(trace, ones, replace(policy, interval_seconds=best))

    def test_live_recovery_loses_a_step_and_a_pause_per_failure(self) -> None:
        trace = simulate_trace(Cluster(16, 8), [FailureKind("any", 0.05, (math.inf,))], 10, seed=2)
        failures = int(trace.is_failure.sum())
        policy = Policy("live", True, recovery_seconds=30, step_seconds=20)
        outcome = goodput(trace, np.ones(len(trace.times)), policy)
        assert failures > 3
        assert outcome.recovery * trace.end == pytest.approx(30 * failures)
        assert outcome.lost_work * trace.end == pytest.approx(20 * failures)

    def test_shares_sum_to_one(self) -> None:
        for name, parts in goodput_report(PAPER, 2, RecoveryCosts()).items():
            assert sum(part["mean"] for part in parts.values()) == pytest.approx(1), name


class TestPaper:
    """Values of arXiv 2504.06095 as its text gives them; docs/paper.md lists the assumptions and their sensitivity."""

    def test_figure_3_tp64_at_a_thousandth_failed(self) -> None:
        assert availability(0.001, 64) == pytest.approx(0.94, abs=0.005)

    def test_figure_4_share_of_time_above_a_thousandth(self) -> None:
        traces = [simulate_trace(PAPER.cluster, PAPER.kinds, PAPER.days, seed) for seed in range(40)]
        share = Band.of([trace.time_share(trace.num_failed > 0.001 * 32_768) for trace in traces])
        assert share.mean == pytest.approx(0.81, abs=0.02)
        assert share.low < 0.81 < share.high

    @pytest.mark.parametrize(("rate", "repair_days"), [(2.0, (3.0, 5.0)), (3.0, (2.5,))])
    def test_figure_4_a_doubled_peak_and_tp64_at_four_fifths_come_together(self, rate: float, repair_days: tuple[float, ...]) -> None:
        """What the paper says of a tripled rate; with its repair times a tripled rate cannot, see docs/paper.md."""
        usual = self._peak(llama3_failures())
        peak = self._peak(llama3_failures(repair_days, rate))
        assert peak / usual == pytest.approx(2.0, abs=0.2)
        assert availability(peak / 32_768, 64) == pytest.approx(0.80, abs=0.01)
        tripled = self._peak(llama3_failures(rate_factor=3.0))
        assert tripled / usual == pytest.approx(2.8, abs=0.15)

    @staticmethod
    def _peak(kinds: tuple[FailureKind, ...]) -> float:
        return monte_carlo(lambda seed: float(simulate_trace(PAPER.cluster, kinds, PAPER.days, seed).num_failed.max()), 20).mean

    def test_figure_6_dp_drop_is_the_share_of_hurt_domains_rounded_up_to_replicas(self) -> None:
        lost = next(row["mean"] for row in loss_report(PAPER, (0.004,), 300) if row["policy"] == "dp-drop")
        hurt = 1 - availability(0.004, 32)
        assert hurt == pytest.approx(0.12, abs=0.001)
        assert hurt < lost < hurt + 1 / 128

    def test_figure_6_loss_at_four_thousandths(self) -> None:
        lost = {row["policy"]: row["mean"] for row in loss_report(PAPER, (0.004,), 300)}
        assert lost["dp-drop"] == pytest.approx(0.12, abs=0.006)
        assert 0.005 < lost["ntp"] <= 0.03
        assert lost["ntp-pw"] < 0.01
        assert lost["dp-drop-unpacked"] > 4 * lost["dp-drop"] and lost["ntp-unpacked"] > 2 * lost["ntp"]

    @pytest.mark.parametrize("exposed_tp", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("efficiency", [0.4, 0.7])
    def test_figure_6_does_not_hang_on_free_numbers(self, exposed_tp: float, efficiency: float) -> None:
        gpu = replace(PAPER.cost.gpu, flops_efficiency=efficiency)
        case = replace(PAPER, cost=replace(PAPER.cost, exposed_tp=exposed_tp, gpu=gpu))
        lost = {row["policy"]: row["mean"] for row in loss_report(case, (0.004,), 100)}
        assert lost["ntp"] <= 0.03 and lost["ntp-pw"] < 0.01

    def test_figure_7_spare_domains(self) -> None:
        case = replace(PAPER, kinds=llama3_failures((5.0,)))
        spares = trace_report(case, 20, spares_to_try=128)["spare_domains_needed"]
        assert spares["dp-drop"]["low"] < 90 < spares["dp-drop"]["max"], "the paper's one trace lies within our seeds"
        assert spares["ntp"]["max"] == 16
        assert spares["ntp-pw"]["median"] == 0

    def test_boosted_domains_at_four_thousandths(self) -> None:
        assert expected_hurt_domains(131, 1024, 32) / 1024 == pytest.approx(0.12, abs=0.005)

    def test_local_batch_at_the_lower_degrees(self) -> None:
        table = PAPER.table()
        assert table.samples_within(NTP)[[32, 30, 28]].tolist() == [8, 7, 6]
        assert table.samples_within(NTP_PW)[[32, 30]].tolist() == [8, 8]

    def test_figure_10_blast_radius_hurts_the_drop_policy_most(self) -> None:
        any_degree = replace(PAPER, degrees=())
        lost = {
            (row["policy"], radius): row["mean"]
            for radius in (1, 4, 8)
            for row in loss_report(any_degree, (0.001,), 60, blast_radius=radius)
        }
        assert lost["ntp", 4] > lost["ntp", 1] and lost["ntp-pw", 4] > lost["ntp-pw", 1]
        assert lost["ntp-pw", 8] <= lost["ntp", 8] < lost["dp-drop", 8] == lost["dp-drop", 1]

    def test_boost_points_of_the_paper(self) -> None:
        gpu = presets.gpu_spec("b200")
        assert gpu.speed_at(1.1) / 1.1 == pytest.approx(1 - 0.028)
        assert gpu.speed_at(1.2) / 1.2 == pytest.approx(1 - 0.065)
        power = gpu.power_for(1.1)
        assert power is not None and gpu.speed_at(power) >= 1.1 > gpu.speed_at(power - 0.002)
        assert gpu.power_for(2.0) is None


class TestLlama3:
    def test_the_record_is_reproduced(self) -> None:
        case = scenario("llama3-405b")
        failures = monte_carlo(
            lambda seed: float(simulate_trace(case.cluster, case.kinds, case.days, seed).is_failure.sum()), 20
        )
        assert failures.mean == pytest.approx(419, rel=0.03)

    def test_live_ntp_beats_restart_under_the_same_failures(self) -> None:
        kept = {name: parts["goodput"]["mean"] for name, parts in goodput_report(scenario("llama3-405b"), 3, RecoveryCosts()).items()}
        assert kept["ntp-live"] > kept["ntp-restart"] > kept["restart"]
        assert kept["ntp-pw-live"] >= kept["ntp-live"] > kept["drop-live"]


class TestBehaviour:
    def test_same_seed_same_run_other_seed_other_run(self) -> None:
        args = (PAPER.cluster, PAPER.kinds, NTP, PAPER.table(), 15)
        assert simulate(*args, seed=7) == simulate(*args, seed=7) != simulate(*args, seed=8)

    def test_fifteen_days_of_32k_gpus_take_few_calls(self) -> None:
        _, num_calls = counted_calls(lambda: simulate(PAPER.cluster, PAPER.kinds, NTP_PW, PAPER.table(), 15))
        assert num_calls < 1_000_000

    def test_permanent_failures_never_come_back(self) -> None:
        trace = simulate_trace(Cluster(1024, 8), [FailureKind("dead", 0.01, (math.inf,))], 20, seed=0)
        assert np.all(np.diff(trace.num_failed) == 1) and trace.num_failed[-1] > 100

    def test_a_blast_takes_its_aligned_group_and_brings_it_back(self) -> None:
        trace = simulate_trace(Cluster(1024, 8), [FailureKind("node", 0.01, (0.5,), blast_radius=4)], 30, seed=0)
        assert set(np.unique(trace.failed)) <= {0, 4, 8}
        assert np.all(trace.failed >= 0) and trace.failed.max() >= 4

    def test_packing_puts_hurt_domains_into_one_replica(self) -> None:
        cluster = Cluster(4 * 2 * 4, 4, 2)
        table = StepTable(4, (math.inf, 4.0, 2.0, 1.3, 1.0), (math.inf, 3.0, 1.6, 1.0, 1.0))
        failed = np.array([[1, 0, 0, 0, 0, 0, 1, 0]])
        packed = replica_degrees(failed, cluster, NTP, table)
        apart = replica_degrees(failed, cluster, replace(NTP, packed=False), table)
        assert packed.tolist() == [[0, 0, 0, 1, 3]] and apart.tolist() == [[0, 0, 0, 2, 2]]
        assert failed.tolist() == [[1, 0, 0, 0, 0, 0, 1, 0]], "the caller's state is left alone"

    def test_batches(self) -> None:
        cluster = Cluster(8, 4)
        table = StepTable(4, (math.inf, 4.0, 2.0, 4 / 3, 1.0), (math.inf, 4.0, 1.5, 1.0, 1.0))
        failed = np.array([[0, 0], [1, 0], [4, 0]])
        assert capacity(failed, cluster, NTP, table).tolist() == [1.0, 7 / 8, 0.5]
        assert capacity(failed, cluster, NTP, table, "pause").tolist() == [1.0, 0.0, 0.0]
        assert capacity(failed, cluster, NTP, table, "keep").tolist() == pytest.approx([1.0, 4 / 5, 0.5])
        assert capacity(failed, cluster, NTP_PW, table).tolist() == [1.0, 1.0, 0.5]

    def test_spares_fill_in_and_are_counted(self) -> None:
        cluster = Cluster(16, 4, 2, spare_domains=3)
        table = StepTable(4, (math.inf,) * 4 + (1.0,), (math.inf,) * 4 + (1.0,))
        trace = Trace(np.array([0.0, 1.0]), 2.0, np.array([[0] * 7, [1, 0, 0, 0, 1, 0, 0]]), np.array([False, True]))
        assert spare_domains_needed(trace, cluster, DROP, table) == 2
        small = replace(cluster, spare_domains=1)
        assert spare_domains_needed(trace.first_domains(5), small, DROP, table) is None

    def test_band(self) -> None:
        band = Band.of(list(range(101)))
        assert (band.mean, band.low, band.median, band.high) == (50, 5, 50, 95)

    def test_idle_time_per_step_weighs_on_lower_degrees(self) -> None:
        plain = StepTable.from_cost(PAPER.cost, 32, 8)
        bubble = StepTable.from_cost(PAPER.cost, 32, 8, idle_samples=7)
        assert bubble.samples_within(NTP)[32] == 8
        assert bubble.samples_within(NTP)[30] < plain.samples_within(NTP)[30]


class TestBadInput:
    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: FailureKind("x", 0, (1.0,)), "per_gpu_day must be a finite number above 0, got 0"),
            (lambda: FailureKind("x", 0.1, (-1.0,)), r"repair takes a time above 0 .*got \(-1.0,\) days"),
            (lambda: FailureKind("x", 0.1, ()), "repair takes a time above 0"),
            (lambda: Cluster(100, 8), "100 GPUs are no whole number of replicas of 1 x 8"),
            (lambda: Cluster(64, 8, spare_domains=-1), "spare domains"),
            (lambda: Policy("x", False, recovery_seconds=-1), "recovery_seconds may not be negative, got -1"),
            (lambda: Policy("x", False, boost=True), "set shrink=True"),
            (lambda: sample_failed(Cluster(64, 8), 65, 0, 1), "cannot draw 65 failed of 64 GPUs"),
            (lambda: expected_hurt_domains(65, 8, 8), "65 failed GPUs do not fit into 64"),
            (lambda: simulate_trace(Cluster(64, 8), [], 1, 0), "needs kinds of failure"),
            (lambda: simulate_trace(Cluster(64, 8), [FailureKind("x", 1, (1.0,), 16)], 1, 0), "at most a domain"),
            (lambda: simulate_trace(Cluster(64, 8), [FailureKind("x", 1, (1.0,))], 0, 0), "days must be"),
            (lambda: monte_carlo(lambda seed: 0.0, 0), "seeds must be"),
            (lambda: scenario("nope"), "unknown preset 'nope'; known: ntp-paper"),
            (lambda: presets.gpu_spec("z80"), "unknown GPU 'z80'"),
            (lambda: record_failures(0, 54, 16, 0.5, (1.0,)), "a failure record needs interruptions"),
            (lambda: availability(1.1, 8), "failed_fraction is a share"),
            (lambda: young_daly_seconds(0, 1), "checkpoint_seconds must be"),
            (lambda: checkpoint_efficiency(1, 1, 1, -1), "restart_seconds may not be negative"),
            (lambda: StepTable.from_cost(PAPER.cost, 32, 8, (30,)), "include the healthy 32"),
            (lambda: capacity(np.zeros((1, 8)), Cluster(64, 8), DROP, PAPER.table()), "for degree 32, the domains have 8"),
            (lambda: capacity(np.zeros((1, 8)), Cluster(64, 8), DROP, PAPER.table(), "x"), "batch is one of"),
            (lambda: GpuSpec("g", 1, 1, 1, 1, flops_efficiency=2), "flops_efficiency lies in"),
            (lambda: GpuSpec("g", 1, 1, 1, 1, boost_losses=((1.2, 0.1), (1.1, 0.2))), "two rising"),
            (lambda: presets.gpu_spec("b200").speed_at(0.5), "at least 1"),
            (lambda: ModelShape(8, 3, 2, 8, 1, 8, 8), "3 query heads do not form groups of 2"),
            (lambda: CostModel(presets.PAPER_MODEL, presets.GPUS["b200"], exposed_tp=2), "exposed_tp is a share"),
            (lambda: PAPER.cost.compute_seconds(129), r"degree 129 is outside 1..128"),
        ],
    )
    def test_clear_errors(self, make: object, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            make()  # type: ignore[operator]

    def test_spares_need_packing(self) -> None:
        cluster = replace(PAPER.cluster, spare_domains=8)
        with pytest.raises(ConfigError, match="spare domains need packing"):
            capacity(np.zeros((1, 1032), np.int64), cluster, replace(NTP, packed=False), PAPER.table())
