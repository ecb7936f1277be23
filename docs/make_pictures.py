"""Draws docs/nested_layouts.png from the layouts that the package itself uses: ``python docs/make_pictures.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from lightning_ntp.layout import ShardLayout, nested_layouts

NUM_GRANULES = 32
NUM_ROLES = 8
LOSS_ORDER = (7, 6)
COLOURS = ("#4477aa", "#ee8833", "#559966", "#bb5577", "#887799", "#997755", "#33a0a0", "#777777")
FOLDER = Path(__file__).parent


def holders(layout: ShardLayout) -> list[int]:
    """Granule -> the role that stores it."""
    by_granule = {index: role for role, spans in layout.spans for span in spans for index in range(span.start, span.stop)}
    return [by_granule[index] for index in range(layout.size)]


def contiguous_recut(roles: tuple[int, ...]) -> ShardLayout:
    """What a uniform cut over the roles that are left would store."""
    balanced = ShardLayout.balanced(NUM_GRANULES, len(roles))
    return ShardLayout(NUM_GRANULES, tuple((role, balanced.of(i)) for i, role in enumerate(roles)))


def moved(old: ShardLayout, new: ShardLayout) -> list[int]:
    """Granules that change their holder."""
    return [i for i, (before, after) in enumerate(zip(holders(old), holders(new), strict=True)) if before != after]


def draw_strip(axes: Axes, y: float, layout: ShardLayout, before: ShardLayout | None, label: str) -> None:
    """One layout as a row of granules in the colour of their role; those that moved are framed."""
    changed = set(moved(before, layout)) if before is not None else set()
    for granule, role in enumerate(holders(layout)):
        axes.add_patch(Rectangle((granule, y), 0.92, 0.8, color=COLOURS[role], lw=0))
        if granule in changed:
            axes.add_patch(Rectangle((granule + 0.05, y + 0.06), 0.82, 0.68, fill=False, ec="black", lw=1.8))
        axes.text(granule + 0.46, y + 0.39, str(role), ha="center", va="center", color="white", fontsize=7)
    axes.text(-0.4, y + 0.4, label, ha="right", va="center", fontsize=9)
    if before is not None:
        axes.text(NUM_GRANULES + 0.3, y + 0.4, f"{len(changed)} move", ha="left", va="center", fontsize=9)


def draw(axes: Axes, title: str, chain: list[ShardLayout]) -> None:
    for row, layout in enumerate(chain):
        label = f"degree {layout.degree}" + (f", role {LOSS_ORDER[row - 1]} lost" if row else ", healthy")
        draw_strip(axes, -1.15 * row, layout, chain[row - 1] if row else None, label)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(-7.5, NUM_GRANULES + 3)
    axes.set_ylim(-1.15 * (len(chain) - 1) - 0.2, 1.0)
    axes.axis("off")


def nested_layouts_picture(file: Path) -> None:
    """Two panels: the nested chain, and a contiguous cut made anew at each degree."""
    nested = list(nested_layouts(NUM_GRANULES, NUM_ROLES, LOSS_ORDER))
    recut = [contiguous_recut(layout.roles) for layout in nested]
    figure, (above, below) = plt.subplots(2, 1, figsize=(10.5, 4.2), facecolor="white")
    draw(above, f"Nested layouts: {NUM_GRANULES} query heads over {NUM_ROLES} roles, each in the colour of the role that stores it", nested)
    draw(below, "For comparison: cut anew into contiguous runs at each degree", recut)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    nested_layouts_picture(FOLDER / "nested_layouts.png")
