"""The sensitivity tables of paper.md: what moves when an assumption does. ``python docs/paper_numbers.py``, about three minutes."""

from __future__ import annotations

from dataclasses import replace

from lightning_ntp.scenarios import NTP, NTP_PW, Scenario, llama3_failures, loss_report, scenario, trace_report

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


def main() -> None:
    print(f"assumption | local batch at 30/28, boosted 30/28 | loss at {FAILED:.1%} failed: dp-drop | ntp | ntp-pw")
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
