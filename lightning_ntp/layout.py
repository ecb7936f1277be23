"""Which part of a dim each role stores: spans, layouts, and the chain of nested layouts over degrees.

Everything here is integers. A *granule* is the smallest piece of a dim that may not be cut (a query head, a feed-forward column);
layouts are built over granules and then `scaled` to elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from lightning_ntp.errors import ConfigError

Relief = tuple[tuple[int, int], ...]
"""What slow roles of a replica keep: ``((role, permille of its even share), ...)``; roles that are not named take the rest."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open range ``[start, stop)`` of a dim; never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(f"a span needs 0 <= start < stop, got [{self.start}:{self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __repr__(self) -> str:
        return f"[{self.start}:{self.stop})"


def merge_runs(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join neighbours that continue each other; the order of the spans, which is the storage order, stays."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].stop == span.start:
            merged[-1] = Span(merged[-1].start, span.stop)
        else:
            merged.append(span)
    return tuple(merged)


def spans_of(indices: Iterable[int]) -> tuple[Span, ...]:
    """The shortest run of spans that lists `indices` in their order."""
    return merge_runs(Span(index, index + 1) for index in indices)


def total_length(spans: Iterable[Span]) -> int:
    """Number of elements that the spans list."""
    return sum(map(len, spans))


def subtract(spans: Sequence[Span], taken: Iterable[Span]) -> tuple[Span, ...]:
    """What is left of `spans` (in storage order) once every index of `taken` is gone."""
    left = list(spans)
    for gone in sorted(taken):
        cut: list[Span] = []
        for span in left:
            if gone.stop <= span.start or span.stop <= gone.start:
                cut.append(span)
                continue
            if span.start < gone.start:
                cut.append(Span(span.start, gone.start))
            if gone.stop < span.stop:
                cut.append(Span(gone.stop, span.stop))
        left = cut
    return merge_runs(left)


@dataclass(frozen=True, slots=True)
class Overlap:
    """One logical run that two storage orders share, with its offset in each."""

    span: Span
    first_offset: int
    second_offset: int


def intersect(first: Sequence[Span], second: Sequence[Span]) -> tuple[Overlap, ...]:
    """Common runs of two storage orders, in the first one's order; offsets count stored elements, not logical ones."""
    second_starts = (0, *accumulate(map(len, second)))
    found, first_start = [], 0
    for one in first:
        for two, second_start in zip(second, second_starts, strict=False):
            start, stop = max(one.start, two.start), min(one.stop, two.stop)
            if start < stop:
                found.append(
                    Overlap(Span(start, stop), first_start + start - one.start, second_start + start - two.start)
                )
        first_start += len(one)
    return tuple(sorted(found, key=lambda overlap: overlap.first_offset))


def slice_storage(spans: Sequence[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The logical spans of stored positions ``[start, stop)``: how FSDP's chunk of a role's local dim maps back."""
    cut, at = [], 0
    for span in spans:
        low, high = max(start - at, 0), min(stop - at, len(span))
        if low < high:
            cut.append(Span(span.start + low, span.start + high))
        at += len(span)
    return merge_runs(cut)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The ordered spans of one dim that each live role stores.

    Args:
        size: length of the whole dim.
        spans: ``((role, (Span, ...)), ...)`` sorted by role. Local storage order is the order of the spans.

    Every index is held by at least one role. A layout may overlap (KV copies): the lowest holder owns an element.

    Raises:
        ConfigError: roles out of order, a span past the end, an index twice in one role or held by nobody.
    """

    size: int
    spans: tuple[tuple[int, tuple[Span, ...]], ...]

    def __post_init__(self) -> None:
        roles = [role for role, _ in self.spans]
        if not roles or roles != sorted(set(roles)) or roles[0] < 0:
            raise ConfigError(f"a layout needs distinct roles in ascending order, got {roles}")
        for role, spans in self.spans:
            ordered = sorted(spans)
            if ordered and ordered[-1].stop > self.size:
                raise ConfigError(f"role {role} stores {ordered[-1]}, past the end of a dim of {self.size}")
            for one, two in pairwise(ordered):
                if two.start < one.stop:
                    raise ConfigError(f"role {role} stores part of {two} twice (also in {one})")
        everything = [Span(0, self.size)] if self.size else []
        missing = subtract(everything, [span for _, spans in self.spans for span in spans])
        if missing:
            raise ConfigError(f"no role stores {missing[0]} of a dim of {self.size}")

    @classmethod
    def from_indices(cls, size: int, indices: Mapping[int, Iterable[int]]) -> ShardLayout:
        """A layout from ``{role: indices in storage order}``."""
        return cls(size, tuple((role, spans_of(indices[role])) for role in sorted(indices)))

    @classmethod
    def balanced(cls, size: int, num_roles: int) -> ShardLayout:
        """`size` granules in contiguous runs over `num_roles` roles; the first roles get the remainder."""
        share, extra = divmod(size, num_roles)
        cuts = [role * share + min(role, extra) for role in range(num_roles + 1)]
        # spans directly: index by index a vocabulary would cost half a second
        return cls(size, tuple((role, (Span(a, b),) if a < b else ()) for role, (a, b) in enumerate(pairwise(cuts))))

    @classmethod
    def concat(cls, parts: Sequence[ShardLayout]) -> ShardLayout:
        """Packed projections (``q|k|v``): the parts follow each other in the dim, each cut by its own layout."""
        starts = (0, *accumulate(part.size for part in parts))
        if len({part.roles for part in parts}) != 1:
            raise ConfigError(f"packed parts need the same roles, got {[part.roles for part in parts]}")
        spans = tuple(
            (role, merge_runs(s for part, start in zip(parts, starts, strict=False) for s in _shift(part.of(role), start)))
            for role in parts[0].roles
        )
        return cls(starts[-1], spans)

    @property
    def roles(self) -> tuple[int, ...]:
        """Live roles, ascending."""
        return tuple(role for role, _ in self.spans)

    @property
    def degree(self) -> int:
        """Number of live roles."""
        return len(self.spans)

    def of(self, role: int) -> tuple[Span, ...]:
        """Spans that `role` stores, in storage order."""
        for candidate, spans in self.spans:
            if candidate == role:
                return spans
        raise ConfigError(f"role {role} is not in this layout; it has roles {self.roles}")

    def local_size(self, role: int) -> int:
        """Elements that `role` stores."""
        return total_length(self.of(role))

    def owned(self, role: int) -> tuple[Span, ...]:
        """Spans that `role` stores and no lower role does: each element of the dim is owned exactly once."""
        lower = [span for other, spans in self.spans if other < role for span in spans]
        return subtract(self.of(role), lower)

    @property
    def overlaps(self) -> bool:
        """Whether some element has more than one holder."""
        return sum(total_length(spans) for _, spans in self.spans) > self.size

    def scaled(self, granule: int) -> ShardLayout:
        """The layout in elements when each index stands for `granule` of them."""
        spans = tuple((role, tuple(Span(s.start * granule, s.stop * granule) for s in held)) for role, held in self.spans)
        return ShardLayout(self.size * granule, spans)

    def relieved(self, relief: Relief) -> ShardLayout:
        """The layout after slow roles have handed the ends of what they store to the others, the least loaded first.

        Whoever stores anything keeps at least one granule. A layout of granules that does not overlap.

        Raises:
            ConfigError: a role that is not in the layout, one that shall keep more than it has, or nobody left to take the rest.
        """
        kept_permille = dict(relief)
        others = [role for role in self.roles if role not in kept_permille]
        if not relief:
            return self
        if not others or not set(kept_permille) < set(self.roles) or not all(0 <= p <= 1000 for p in kept_permille.values()):
            raise ConfigError(
                f"relief names some of the roles {self.roles}, and of each 0 to 1000 permille that it keeps, got {relief}"
            )
        held, gift = {role: self.of(role) for role in others}, list[Span]()
        for role, permille in relief:
            spans, load = self.of(role), self.local_size(role)
            kept = max(min(load, 1), (load * permille + 500) // 1000)
            held[role] = slice_storage(spans, 0, kept)
            gift += slice_storage(spans, kept, load)
        return ShardLayout(self.size, _handed_out(gift, held, others))

    def grouped(self, group_size: int) -> ShardLayout:
        """The layout of the groups that the stored indices fall into: KV heads from query heads.

        A group that is split over roles is stored by each of them, in the order in which the role first needs it.
        """
        if group_size < 1 or self.size % group_size:
            raise ConfigError(f"{self.size} granules do not form groups of {group_size}")
        held = {
            role: dict.fromkeys(index // group_size for span in spans for index in range(span.start, span.stop))
            for role, spans in self.spans
        }
        return ShardLayout.from_indices(self.size // group_size, held)

    def __repr__(self) -> str:
        held = "; ".join(f"{role}: {''.join(map(repr, spans)) or 'nothing'}" for role, spans in self.spans)
        return f"ShardLayout({self.size}, {held})"


def _shift(spans: Iterable[Span], offset: int) -> Iterator[Span]:
    return (Span(span.start + offset, span.stop + offset) for span in spans)


@dataclass(frozen=True, slots=True)
class NestedLayouts:
    """The layouts of one dim at every degree, healthy first; ``nested[degree]`` is the `ShardLayout` at that degree.

    Args:
        layouts: one per degree.
        parts: what these layouts were derived from and `factor` how, so that another loss order can be derived alike;
            `nested_layouts` and the methods here fill both in.
    """

    layouts: tuple[ShardLayout, ...]
    parts: tuple[NestedLayouts, ...] = field(default=(), repr=False, compare=False)
    factor: int = field(default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        degrees = [layout.degree for layout in self.layouts]
        if not degrees or degrees != list(range(degrees[0], degrees[0] - len(degrees), -1)):
            raise ConfigError(f"nested layouts need degrees that fall by one, got {degrees}")
        if len({layout.size for layout in self.layouts}) != 1:
            raise ConfigError(f"nested layouts need one size, got {[layout.size for layout in self.layouts]}")

    @property
    def size(self) -> int:
        """Length of the dim."""
        return self.layouts[0].size

    @property
    def num_roles(self) -> int:
        """Degree of the healthy layout."""
        return self.layouts[0].degree

    def __getitem__(self, degree: int) -> ShardLayout:
        position = self.num_roles - degree
        if not 0 <= position < len(self.layouts):
            lowest = self.layouts[-1].degree
            raise ConfigError(f"degree {degree} is outside the planned degrees {lowest} to {self.num_roles}")
        return self.layouts[position]

    def __iter__(self) -> Iterator[ShardLayout]:
        return iter(self.layouts)

    def at(self, degree: int, relief: Relief = ()) -> ShardLayout:
        """The layout of a replica of `degree` whose slow roles are relieved; whole granules move, all parts of a dim alike."""
        if not relief:
            return self[degree]
        if not self.parts:
            return self[degree].relieved(relief)
        parts = [part.at(degree, relief) for part in self.parts]
        if not self.factor:
            return ShardLayout.concat(parts)
        return parts[0].scaled(self.factor) if self.factor > 0 else parts[0].grouped(-self.factor)

    def scaled(self, granule: int) -> NestedLayouts:
        """In elements: see `ShardLayout.scaled`."""
        return NestedLayouts(tuple(layout.scaled(granule) for layout in self.layouts), (self,), granule)

    def grouped(self, group_size: int) -> NestedLayouts:
        """Over groups: see `ShardLayout.grouped`."""
        return NestedLayouts(tuple(layout.grouped(group_size) for layout in self.layouts), (self,), -group_size)

    @classmethod
    def concat(cls, parts: Sequence[NestedLayouts]) -> NestedLayouts:
        """Packed parts at every degree: see `ShardLayout.concat`."""
        return cls(tuple(ShardLayout.concat(at_degree) for at_degree in zip(*parts, strict=True)), tuple(parts))

    def reordered(self, loss_order: Sequence[int]) -> NestedLayouts:
        """The same dim cut in the same way for another loss order; the healthy layout stays what it is."""
        if not self.parts:
            return nested_layouts(self.size, self.num_roles, loss_order)
        parts = [part.reordered(loss_order) for part in self.parts]
        if not self.factor:
            return NestedLayouts.concat(parts)
        return parts[0].scaled(self.factor) if self.factor > 0 else parts[0].grouped(-self.factor)

    @property
    def digest(self) -> str:
        """Equal on two workers exactly when their layouts are."""
        return hashlib.sha256(repr(self.layouts).encode()).hexdigest()[:16]


def nested_layouts(num_granules: int, num_roles: int, loss_order: Sequence[int] = ()) -> NestedLayouts:
    """The chain of layouts of DESIGN 3: each is the one before, less the next lost role.

    The lost role's granules go to the least loaded live roles: how many each takes is found by dealing them out one by one
    (ties to the lowest role), then they are handed out as contiguous runs, so that few spans arise. At every degree d the
    largest load is ``ceil(num_granules / d)``, the best possible, and from one degree to the next only the lost role's
    granules move.

    Args:
        num_granules: granules of the dim; may be fewer than roles (then some roles store nothing).
        num_roles: healthy degree.
        loss_order: roles, first lost first; at most ``num_roles - 1`` of them (the last role cannot be lost).

    Raises:
        ConfigError: sizes below 1, a role that does not exist, a role twice, or an order that leaves no role.
    """
    if num_granules < 1 or num_roles < 1:
        raise ConfigError(f"layouts need at least 1 granule and 1 role, got {num_granules} and {num_roles}")
    order = tuple(loss_order)
    if len(set(order)) != len(order) or not set(order) <= set(range(num_roles)) or len(order) >= num_roles:
        raise ConfigError(
            f"loss_order {order} must name distinct roles of 0..{num_roles - 1} and leave at least one of them"
        )
    layouts = [ShardLayout.balanced(num_granules, num_roles)]
    for lost in order:
        layouts.append(_without(layouts[-1], lost))
    return NestedLayouts(tuple(layouts))


def _without(layout: ShardLayout, lost: int) -> ShardLayout:
    held = {role: layout.of(role) for role in layout.roles if role != lost}
    return ShardLayout(layout.size, _handed_out(layout.of(lost), held, list(held)))


def _handed_out(
    gift: Sequence[Span], held: Mapping[int, tuple[Span, ...]], takers: Sequence[int]
) -> tuple[tuple[int, tuple[Span, ...]], ...]:
    """What all roles hold once `gift` has gone to the `takers`, the least loaded first, as contiguous runs."""
    takes = _deal(total_length(gift), {role: total_length(held[role]) for role in takers})
    spans, at = [], 0
    for role in sorted(held):
        taken = slice_storage(gift, at, at + takes.get(role, 0))
        at += takes.get(role, 0)
        spans.append((role, merge_runs((*held[role], *taken))))
    return tuple(spans)


def _deal(num_granules: int, loads: Mapping[int, int]) -> dict[int, int]:
    """How many granules each role takes when they are dealt one by one to the least loaded, ties to the lowest role.

    Closed form of the dealing, so that a vocabulary of 128,000 rows costs no loop over its rows: fill up to a common level,
    then one more for the first roles that stand at that level.
    """
    low, high = min(loads.values()), max(loads.values()) + num_granules
    while low < high:  # the highest level that can be filled completely
        level = (low + high + 1) // 2
        if sum(max(level - load, 0) for load in loads.values()) <= num_granules:
            low = level
        else:
            high = level - 1
    takes = {role: max(low - load, 0) for role, load in loads.items()}
    rest = num_granules - sum(takes.values())
    for role in sorted(role for role in loads if loads[role] + takes[role] == low)[:rest]:
        takes[role] += 1
    return takes
