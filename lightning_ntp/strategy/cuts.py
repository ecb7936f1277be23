"""From "this module is a column layer" to integers: which dim of which parameter is cut, and over which layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_ntp.layout import NestedLayouts, nested_layouts
from lightning_ntp.model_spec import HeadCut, ModuleRule, Style
from lightning_ntp.strategy.adapters import adapter_names, has_dropout
from lightning_ntp.strategy.planned import GATHERED, Planned, PlanStyle, own_parameters, refusal

_PACKED_MLP = "gate_up_proj"
"""The name under which models keep ``gate|up`` in one layer."""


@dataclass(frozen=True, slots=True)
class ParamCut:
    """The part of a `ParamSpec` that is not read off the parameter itself."""

    dim: int | None = None
    layouts: NestedLayouts | None = None
    partial: bool = False


@dataclass(slots=True)
class CutState:
    """Rules and parameter cuts as they are collected, and the layouts made so far (one per number of granules)."""

    num_roles: int
    loss_order: tuple[int, ...]
    rules: list[ModuleRule] = field(default_factory=list)
    params: dict[str, ParamCut] = field(default_factory=dict)
    layouts: dict[int, NestedLayouts] = field(default_factory=dict)

    def granules(self, one: Planned, num_granules: int, what: str) -> NestedLayouts:
        """Layouts over `num_granules`, refused where a role would get none."""
        if num_granules < self.num_roles:
            raise one.refused(
                f"{num_granules} {what} cannot be shared by {self.num_roles} roles",
                f"Use tensor_parallel_size <= {num_granules}",
            )
        if num_granules not in self.layouts:
            self.layouts[num_granules] = nested_layouts(num_granules, self.num_roles, self.loss_order)
        return self.layouts[num_granules]

    def linear(self, one: Planned, layouts: NestedLayouts, heads: HeadCut | None = None) -> None:
        """Cuts one column or row layer; `heads` where its output holds KV heads that several query heads share."""
        is_column = one.style is PlanStyle.COLUMN
        style = Style.COLUMN if is_column else Style.ROW
        cut_dim = int(is_column == isinstance(one.module, Conv1D))
        self._linear(one.layer, style, cut_dim, layouts, heads, getattr(one.module, "bias", None) is not None)
        if one.wrapper is None:
            return
        for adapter in adapter_names(one.wrapper):
            # The one of the two small layers that touches the cut features; the other is whole on all roles.
            name = f"{'lora_B' if is_column else 'lora_A'}.{adapter}"
            has_bias = getattr(one.wrapper.get_submodule(name), "bias", None) is not None
            self._linear(f"{one.fqn}.{name}", style, 0 if is_column else 1, layouts, heads, has_bias)
            if has_dropout(one.wrapper, adapter):
                drop = Style.SHARED_DROPOUT if is_column else Style.ROLE_DROPOUT
                self.rules.append(ModuleRule(f"{one.fqn}.lora_dropout.{adapter}", drop))

    def _linear(
        self, fqn: str, style: Style, cut_dim: int, layouts: NestedLayouts, heads: HeadCut | None, has_bias: bool
    ) -> None:
        self.rules.append(ModuleRule(fqn, style, layouts, heads, kv_features=heads is not None))
        self.params[f"{fqn}.weight"] = ParamCut(cut_dim, layouts)
        if style is Style.COLUMN and has_bias:
            self.params[f"{fqn}.bias"] = ParamCut(0, layouts)

    def vocabulary(self, one: Planned) -> None:
        """Cuts an embedding or a head by the rows of its table."""
        layouts = self.granules(one, one.out_features, "vocabulary rows")
        style = Style.VOCAB_EMBEDDING if one.style is PlanStyle.VOCAB_EMBEDDING else Style.VOCAB_HEAD
        self.rules.append(ModuleRule(one.fqn, style, layouts))
        for name, _ in one.module.named_parameters(recurse=False):
            self.params[f"{one.fqn}.{name}"] = ParamCut(0, layouts)


def split(members: Sequence[Planned]) -> tuple[list[Planned], list[Planned]]:
    """(column layers, row layers)."""
    columns = [one for one in members if one.style is PlanStyle.COLUMN]
    return columns, [one for one in members if one.style is PlanStyle.ROW]


def cut_feed_forward(
    state: CutState, parent: str, module: nn.Module, members: Sequence[Planned], styles: Mapping[str, PlanStyle]
) -> None:
    """Column layers whose output is exactly the input of row layers beside them; each such width is one layout.

    Raises:
        UnsupportedModelError: a column layer without its row layer or the other way round, fewer columns than roles, a
            norm over features that are cut.
    """
    columns, rows = split(members)
    widths = {row.in_features for row in rows}
    made: set[int] = set()
    for column in columns:
        width = column.out_features
        is_packed = column.name == _PACKED_MLP and width // 2 in widths
        width = width // 2 if is_packed else width
        if width not in widths or (column.word == GATHERED and not is_packed):
            raise column.refused(
                f"no row layer in {parent or 'the model'} takes its {column.out_features} output features as they are",
                "Name the row layer that follows it in the plan, both inside one module",
            )
        made.add(width)
        layouts = state.granules(column, width, "feed-forward columns")
        state.linear(column, NestedLayouts.concat((layouts, layouts)) if is_packed else layouts)
    for row in rows:
        if row.in_features not in made:
            raise row.refused(
                f"no column layer in {parent or 'the model'} makes the {row.in_features} features it takes in parts",
                "Name the column layer before it in the plan, both inside one module",
            )
        state.linear(row, state.granules(row, row.in_features, "feed-forward columns"))
    whole = {column.in_features for column in columns} | {row.out_features for row in rows}
    _refuse_inner_parameters(parent, module, whole - widths, styles)
    _refuse_dropout(members, module)


def _refuse_inner_parameters(parent: str, module: nn.Module, whole: set[int], styles: Mapping[str, PlanStyle]) -> None:
    """A scale, norm or learned activation on cut features sees a part of them: its gradient would be a part, or worse.

    Vectors as wide as the uncut input or output (a norm before the column layer) are fine as they are.
    """
    for fqn, owner, name, shape in own_parameters(parent, module):
        outer = {fqn.rsplit(".", cut)[0] for cut in range(fqn.count(".") + 1)}
        if outer & styles.keys() or len(shape) > 1 or (shape and shape[0] in whole):
            continue
        todo = (
            f'If it acts on each of them alike, pass plan={{"{fqn}": "partial"}}, if it does not meet them "replicate"'
        )
        raise refusal(
            fqn,
            owner,
            "none",
            f"its {name} {list(shape)} may act on features that are cut over roles, and the plan does not name it",
            todo if fqn != parent else "Move it into a submodule that the plan can name",
        )


def _refuse_dropout(members: Sequence[Planned], module: nn.Module) -> None:
    """Dropout on cut features would draw another count of random numbers on each role; visible in a Sequential only."""
    if not isinstance(module, nn.Sequential):
        return
    styles = {one.name: one for one in members}
    inside: Planned | None = None
    for name, child in module.named_children():
        if name in styles:
            inside = styles[name] if styles[name].style is PlanStyle.COLUMN else None
        elif inside is not None and isinstance(child, nn.Dropout) and child.p > 0:
            raise inside.refused(
                f"the dropout {name!r} after it acts on features that are cut over roles",
                "Move it behind the row layer",
            )
