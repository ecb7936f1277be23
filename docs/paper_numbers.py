"""The sensitivity tables of paper.md: what moves when an assumption does. ``python docs/paper_numbers.py``, about three minutes."""

from __future__ import annotations

from dataclasses import replace

from lightning_ntp.reliability import availability
from lightning_ntp.scenarios import DROP, NTP, NTP_PW, Scenario, llama3_failures, loss_report, scenario, trace_report
from lightning_ntp.simulator import Band, simulate_trace, spare_domains_needed

PAPER = scenario("ntp-paper")
FAILED = 0.004


def loss_row(name: str, case: Scenario, batch: str = "floating") -> None:
    table = case.table()
    lost = {row["policy"]: row["mean"] for row in loss_report(case, (FAILED,), 200, batch)}
    local = "/".join(str(table.samples_within(policy)[degree]) for policy in (NTP, NTP_PW) for degree in (30, 28))
    shown = " | ".join(f"{lost[policy]:.2%}" for policy in ("dp-drop", "ntp", "ntp-pw"))
    print(f"| {name} | {local} | {shown} |")


def trace_row(name: str, case: Scenario) -> None:
    found = trace_report(case, 30, spares_to_try=300)
    above, peak, spares = found["share_of_time_above_threshold"], found["peak_failed_gpus"], found["spare_domains_needed"]
    needed = " | ".join(f"{band['mean']:.1f} ({band['low']:.0f}-{band['high']:.0f})" for band in spares.values())
    print(f"| {name} | {above['mean']:.1%} | {peak['mean']:.0f} ({peak['low']:.0f}-{peak['high']:.0f}) | {needed} |")


def peak_row(name: str, case: Scenario, usual: float) -> float:
    """Prints the peak of GPUs that are down, as a multiple of `usual` too, and TP64's availability then; returns the peak."""
    traces = [simulate_trace(case.cluster, case.kinds, case.days, seed) for seed in range(30)]
    peak = Band.of([float(trace.num_failed.max()) for trace in traces])
    expected = case.cluster.num_gpus * sum(kind.per_gpu_day * sum(kind.repair_days) / len(kind.repair_days) for kind in case.kinds)
    tp64 = availability(peak.mean / case.cluster.num_gpus, 64)
    print(f"| {name} | {expected:.0f} | {peak.mean:.0f} ({peak.low:.0f}-{peak.high:.0f}) | {peak.mean / (usual or peak.mean):.1f} | {tp64:.1%} |")
    return peak.mean


def peaks() -> None:
    print("\nfailure rate, hardware repair | down on average, rate x repair | peak of failed GPUs | against 1x | TP64 at the peak")
    usual = peak_row("1x, 3/5 days", PAPER, 0.0)
    for factor, days in ((3.0, (3.0, 5.0)), (3.0, (3.0,)), (3.0, (2.5,)), (2.0, (3.0, 5.0))):
        name = f"{factor:g}x, {'/'.join(f'{d:g}' for d in days)} days"
        peak_row(name, replace(PAPER, kinds=llama3_failures(days, factor)), usual)


def drop_row(name: str, case: Scenario, num_seeds: int = 100) -> None:
    """Prints the spare domains that a fixed batch needs under DP-DROP, and in how many traces these are the paper's 90 or more."""
    spacious, needed = replace(case.cluster, spare_domains=160), []
    for seed in range(num_seeds):
        trace = simulate_trace(spacious, case.kinds, case.days, seed)
        needed.append(spare_domains_needed(trace, spacious, DROP, case.table()) or 161)
    band, enough = Band.of([float(count) for count in needed]), sum(count >= 90 for count in needed) / num_seeds
    print(f"| {name} | {band.mean:.0f} ({band.low:.0f}-{band.high:.0f}), at most {max(needed)} | {enough:.0%} |")


def drops() -> None:
    five = replace(PAPER, kinds=llama3_failures((5.0,)))
    print("\nDP-DROP, hardware repaired in 5 days | spare domains | traces that need 90 or more")
    drop_row("as in the preset, 15 days", five)
    drop_row("planned interruptions too: 466 instead of 419", replace(five, kinds=llama3_failures((5.0,), 466 / 419)))
    drop_row("54 days, as long as the record", replace(five, days=54), 50)


def main() -> None:
    peaks()
    drops()
    print(f"\nassumption | local batch at 30/28, boosted 30/28 | loss at {FAILED:.1%} failed: dp-drop | ntp | ntp-pw")
    loss_row("as in the preset", PAPER)
    for exposed in (0.0, 1.0):
        loss_row(f"exposed_tp={exposed}", replace(PAPER, cost=replace(PAPER.cost, exposed_tp=exposed)))
    for efficiency in (0.4, 0.7):
        gpu = replace(PAPER.cost.gpu, flops_efficiency=efficiency)
        loss_row(f"flops_efficiency={efficiency}", replace(PAPER, cost=replace(PAPER.cost, gpu=gpu)))
    for power in (1.1, 1.2, 1.5):
        gpu = replace(PAPER.cost.gpu, max_power=power)
        loss_row(f"max_power={power}", replace(PAPER, cost=replace(PAPER.cost, gpu=gpu)))
    for idle in (1.0, 2.0, 7.0):
        loss_row(f"idle_samples={idle}", replace(PAPER, idle_samples=idle))
    loss_row("any degree", replace(PAPER, degrees=()))
    for samples in (8, 16, 64):
        loss_row(f"batch kept, {samples} samples a replica", replace(PAPER, samples=samples), "keep")
    print("\nhardware repair, rate | time above 0.1% | peak failed GPUs | spares: dp-drop | ntp | ntp-pw")
    for days in ((3.0,), (3.0, 5.0), (5.0,)):
        for factor in (1.0, 3.0):
            trace_row(f"{'/'.join(f'{d:g}' for d in days)} days, {factor:g}x", replace(PAPER, kinds=llama3_failures(days, factor)))


if __name__ == "__main__":
    main()
