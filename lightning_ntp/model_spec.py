"""How a model is cut, declared once: a `ParamSpec` per parameter, a `ModuleRule` per module that must act differently.

A parameter is looked at as a matrix (rows x columns): dim 0 against all the others. A worker's *cell* of it is a product of row
indices and column indices, and whatever moves anywhere is the intersection of two cells.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from lightning_ntp.errors import ConfigError
from lightning_ntp.layout import NestedLayouts, Relief, Span, intersect, slice_storage, subtract, total_length


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a worker stands in its replica: tp degree and role, fsdp size and coordinate; and whom of it the others relieve."""

    degree: int
    role: int
    fsdp_size: int
    fsdp_coordinate: int
    relief: Relief = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle that two cells share: where its top left corner is stored in each, and its extent in elements."""

    rows: Span
    columns: Span
    source_row: int
    source_column: int
    destination_row: int
    destination_column: int

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return len(self.rows) * len(self.columns)


@dataclass(frozen=True, slots=True)
class Cell:
    """Row indices x column indices of a parameter, each in storage order."""

    rows: tuple[Span, ...]
    columns: tuple[Span, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Stored (rows, columns)."""
        return total_length(self.rows), total_length(self.columns)

    @property
    def numel(self) -> int:
        """Stored elements."""
        return prod(self.shape)

    def pieces(self, destination: Cell) -> tuple[Piece, ...]:
        """The rectangles in which this cell (the source) and `destination` overlap, in one fixed order on all workers."""
        columns = intersect(self.columns, destination.columns)
        return tuple(
            Piece(row.span, column.span, row.first_offset, column.first_offset, row.second_offset, column.second_offset)
            for row in intersect(self.rows, destination.rows)
            for column in columns
        )

    def minus(self, other: Cell) -> tuple[Cell, ...]:
        """What is left once the overlap with `other` is taken: at most two cells."""
        rows_outside = subtract(self.rows, other.rows)
        rows_inside = subtract(self.rows, rows_outside)
        if not rows_inside or not intersect(self.columns, other.columns):
            return (self,) if self.numel else ()
        rest = (Cell(rows_outside, self.columns), Cell(rows_inside, subtract(self.columns, other.columns)))
        return tuple(cell for cell in rest if cell.numel)


@dataclass(frozen=True)
class ParamSpec:
    """How one parameter is cut over roles, and over fsdp inside a role.

    Args:
        fqn: name in ``model.named_parameters()``.
        shape: whole shape.
        dim: the tensor dim that tp cuts (0, or 1 of a matrix); None: every role stores all of it.
        layouts: of that dim, in elements, at every planned degree; None exactly when `dim` is.
        partial: a replicated parameter whose gradient is a partial sum on each role (q/k norms) rather than equal on all.
    """

    fqn: str
    shape: tuple[int, ...]
    dim: int | None = None
    layouts: NestedLayouts | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if (self.dim is None) != (self.layouts is None):
            raise ConfigError(f"{self.fqn}: dim and layouts come together, got dim={self.dim}, layouts={self.layouts}")
        if self.dim is None or self.layouts is None:
            return
        if self.dim not in (0, 1) or self.dim >= len(self.shape) or (self.dim == 1 and len(self.shape) != 2):
            raise ConfigError(f"{self.fqn}: tp can cut dim 0, or dim 1 of a matrix; got dim {self.dim} of {self.shape}")
        if self.layouts.size != self.shape[self.dim]:
            raise ConfigError(
                f"{self.fqn}: the layout covers {self.layouts.size} elements, dim {self.dim} of {self.shape} has another size"
            )
        if self.partial:
            raise ConfigError(f"{self.fqn}: only a replicated parameter can have a partial gradient")

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @cached_property
    def matrix_shape(self) -> tuple[int, int]:
        """(dim 0, all other dims); a scalar counts as 1 x 1."""
        return (self.shape[0], prod(self.shape[1:])) if self.shape else (1, 1)

    def fsdp_dim(self, fsdp_size: int) -> int:
        """The dim that fsdp cuts: the one that tp does not, so that cells nest over degrees.

        FSDP2 cuts dims past 0 only where they divide; elsewhere dim 0 is cut, which is as right and moves more bytes.
        """
        crosses = self.dim == 0 and len(self.shape) == 2 and self.shape[1] % fsdp_size == 0
        return 1 if crosses else 0

    def role_cell(self, degree: int, role: int, relief: Relief = ()) -> Cell:
        """What `role` of a replica of `degree` stores when fsdp does not cut (fsdp size 1)."""
        spans: list[tuple[Span, ...]] = [(Span(0, size),) if size else () for size in self.matrix_shape]
        if self.dim is not None and self.layouts is not None:
            spans[self.dim] = self.layouts.at(degree, relief).of(role)
            if self.dim == 0 and len(self.shape) == 0:
                raise ConfigError(f"{self.fqn}: a scalar cannot be cut")
        return Cell(spans[0], spans[1])

    def cell(self, at: Coordinates) -> Cell:
        """What the worker at these coordinates stores of the parameter, its gradient and its optimizer state."""
        whole = self.role_cell(at.degree, at.role, at.relief)
        spans = [whole.rows, whole.columns]
        dim = self.fsdp_dim(at.fsdp_size)
        chunk = -(-total_length(spans[dim]) // at.fsdp_size)
        spans[dim] = slice_storage(spans[dim], at.fsdp_coordinate * chunk, (at.fsdp_coordinate + 1) * chunk)
        return Cell(spans[0], spans[1])

    def owned_cell(self, at: Coordinates, lowest_role: int) -> Cell:
        """The part of `cell` that this worker owns: over the workers of one replica every element once.

        A copy belongs to its lowest holder, a replicated parameter to the replica's `lowest_role`.
        """
        cell = self.cell(at)
        if self.dim is None or self.layouts is None:
            return cell if at.role == lowest_role else Cell((), ())
        owned = self.layouts.at(at.degree, at.relief).owned(at.role)
        spans = [cell.rows, cell.columns]
        spans[self.dim] = subtract(spans[self.dim], subtract(spans[self.dim], owned))
        return Cell(spans[0], spans[1])

    def flat_shape(self, at: Coordinates) -> tuple[int, int]:
        """(rows, columns) that FSDP2 reserves for the gradient in its flat bucket: rows padded to equal chunks."""
        rows, columns = self.role_cell(at.degree, at.role, at.relief).shape
        if self.fsdp_dim(at.fsdp_size) == 1:
            return rows, columns // at.fsdp_size
        return -(-rows // at.fsdp_size), columns


class Style(enum.Enum):
    """What a module becomes when its replica is cut over roles."""

    COLUMN = "column"  # output features cut; weight and bias cut
    ROW = "row"  # input features cut; outputs summed over roles, bias added once after the sum
    VOCAB_EMBEDDING = "vocab_embedding"  # rows of the table cut
    VOCAB_HEAD = "vocab_head"  # logits cut by vocabulary
    ATTENTION = "attention"  # local heads, KV copies, role-derived randomness inside
    SHARED_DROPOUT = "shared_dropout"  # inside an ATTENTION, on activations that are equal on all roles: one mask for all
    ROLE_DROPOUT = "role_dropout"  # on cut features: each role its own mask


@dataclass(frozen=True, slots=True)
class HeadCut:
    """How an attention module's heads are cut.

    Args:
        queries: layouts over query heads.
        group_size: query heads per KV head in the whole model.
        head_dim: features per head.
    """

    queries: NestedLayouts
    group_size: int
    head_dim: int

    @property
    def keys(self) -> NestedLayouts:
        """Layouts over KV heads; overlapping where a group is split over roles."""
        return self.queries.grouped(self.group_size)

    def expansion(self, degree: int, role: int, relief: Relief = ()) -> tuple[int, ...]:
        """For each local query head the position of its KV head among the local KV heads."""
        indices = [i for s in self.queries.at(degree, relief).of(role) for i in range(s.start, s.stop)]
        position = {head: at for at, head in enumerate(dict.fromkeys(i // self.group_size for i in indices))}
        return tuple(position[i // self.group_size] for i in indices)

    def uniform_group(self, degree: int, role: int, relief: Relief = ()) -> int | None:
        """Local query heads per local KV head if that number is the same for all of them, else None (expand then)."""
        expansion = self.expansion(degree, role, relief)
        num_keys = len(set(expansion))
        size = len(expansion) // max(num_keys, 1)
        return size if expansion == tuple(key for key in range(num_keys) for _ in range(size)) else None

    def visible_keys(self, degree: int, role: int, relief: Relief = ()) -> int:
        """KV heads that the attention code sees: the local ones, or one per local query head where they are expanded."""
        expansion = self.expansion(degree, role, relief)
        return len(expansion) if self.uniform_group(degree, role, relief) is None else len(set(expansion))


@dataclass(frozen=True)
class ModuleRule:
    """What happens to one module.

    Args:
        fqn: name in ``model.named_modules()``.
        style: see `Style`.
        layouts: of the cut feature dim in elements (COLUMN: output, ROW: input, VOCAB_*: vocabulary).
        heads: for ATTENTION, and for a COLUMN layer whose output holds KV heads (k_proj, v_proj, packed qkv).
        kv_features: for such a COLUMN layer, the KV heads' place in the local output: how many query-head features
            precede them (packed ``q|k|v``: the local query features; a plain k_proj: 0) is derived at swap time
            when this is True; False for layers without KV heads.
        local_sizes: ``((attribute, layouts), ...)``: integer attributes of the module that must hold the local size.
        local_config: the same for attributes of ``module.config``, which is shared by all modules: the module needs a copy.
        key_counts: attributes of an ATTENTION module that must hold `HeadCut.visible_keys`.
        output_projection: name of the ROW module that ends an ATTENTION module's region of local heads. What the module
            does after it (gpt2's residual dropout) acts on replicated activations again, with one mask for all roles.
    """

    fqn: str
    style: Style
    layouts: NestedLayouts | None = None
    heads: HeadCut | None = None
    kv_features: bool = False
    local_sizes: tuple[tuple[str, NestedLayouts], ...] = ()
    local_config: tuple[tuple[str, NestedLayouts], ...] = ()
    key_counts: tuple[str, ...] = ()
    output_projection: str = ""


@dataclass(frozen=True)
class ModelPlan:
    """Everything the strategy needs to know about a model.

    Args:
        params: one spec per distinct parameter, in ``named_parameters()`` order (a tied parameter under its first name).
        rules: one per module that changes.
        units: names of the modules that become FSDP units, in forward order; the root is always one more.
        num_roles: healthy degree the layouts are made for.
        loss_order: of the layouts.
    """

    params: tuple[ParamSpec, ...]
    rules: tuple[ModuleRule, ...]
    units: tuple[str, ...]
    num_roles: int
    loss_order: tuple[int, ...] = ()
    by_fqn: Mapping[str, ParamSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_fqn = {spec.fqn: spec for spec in self.params}
        if len(by_fqn) != len(self.params):
            raise ConfigError("a parameter has two specs")
        for spec in self.params:
            if spec.layouts is not None and spec.layouts.num_roles != self.num_roles:
                raise ConfigError(f"{spec.fqn}: cut over {spec.layouts.num_roles} roles in a plan for {self.num_roles}")
        object.__setattr__(self, "by_fqn", by_fqn)

    def reordered(self, loss_order: Sequence[int]) -> ModelPlan:
        """The same cuts for another loss order: what a first loss makes of the plan of a complete job."""
        if tuple(loss_order) == self.loss_order:
            return self
        made: dict[int, NestedLayouts] = {}  # by identity: equal layouts of different origin part under another order

        def again(layouts: NestedLayouts) -> NestedLayouts:
            if id(layouts) not in made:
                made[id(layouts)] = layouts.reordered(loss_order)
            return made[id(layouts)]

        params = (spec if spec.layouts is None else replace(spec, layouts=again(spec.layouts)) for spec in self.params)
        rules = (
            replace(
                rule,
                layouts=None if rule.layouts is None else again(rule.layouts),
                heads=None if rule.heads is None else replace(rule.heads, queries=again(rule.heads.queries)),
                local_sizes=tuple((name, again(layouts)) for name, layouts in rule.local_sizes),
                local_config=tuple((name, again(layouts)) for name, layouts in rule.local_config),
            )
            for rule in self.rules
        )
        return replace(self, params=tuple(params), rules=tuple(rules), loss_order=tuple(loss_order))
