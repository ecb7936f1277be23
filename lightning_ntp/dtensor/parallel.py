"""Layers cut over roles, by class swap: names, state dict keys and users' references to a module stay.

    x --copy--> COLUMN --> local features --> ROW --sum over roles--> y

Forward works on local tensors with explicit collectives: no DTensor dispatch, and torch.compile makes one graph of it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import DeviceMesh

from lightning_ntp.dtensor.collectives import copy_to_roles, reduce_from_roles
from lightning_ntp.dtensor.cut import CutModule, CutState, become, local_tensor, set_local
from lightning_ntp.dtensor.randomness import RoleRandomness
from lightning_ntp.dtensor.vocab import VocabEmbedding, VocabHead, prepare_vocab
from lightning_ntp.errors import UnsupportedModelError
from lightning_ntp.layout import NestedLayouts
from lightning_ntp.model_spec import Coordinates, ModuleRule, Style


class _Multiply(CutModule):
    """Weight layouts: nn.Linear stores (out, in), Hugging Face's Conv1D (in, out)."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ W + bias`` on this role's part of the weight."""
        weight = local_tensor(self.weight)
        return F.linear(x, weight if isinstance(self, nn.Linear) else weight.t(), bias)


class Column(_Multiply):
    """Output features cut: every role computes its own features of the same input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., local out). Collective over the tp axis in backward."""
        bias = None if self.bias is None else local_tensor(self.bias)
        y = self.multiply(copy_to_roles(x, self.cut.group), bias)
        return y if self.cut.expansion is None else self._expand(y)

    def _expand(self, y: torch.Tensor) -> torch.Tensor:
        """Repeat each KV head for its local query heads, where their numbers differ from head to head."""
        cut = self.cut
        queries, keys = y[..., : cut.query_features], y[..., cut.query_features :]
        # One block of KV heads (k_proj, v_proj) or two (packed q|k|v).
        blocks = keys.unflatten(-1, (2 if cut.query_features else 1, -1, cut.head_dim))
        expanded = blocks.index_select(-2, cut.expansion).flatten(-3)
        return torch.cat([queries, expanded], dim=-1) if cut.query_features else expanded


class Row(_Multiply):
    """Input features cut: partial sums are added up, the bias once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., local in) -> (..., out). Collective over the tp axis."""
        if self.cut.randomness is not None:
            self.cut.randomness.leave()
        y = reduce_from_roles(self.multiply(x, None), self.cut.group)
        return y if self.bias is None else y + local_tensor(self.bias)


class Attention(CutModule):
    """Local heads. Randomness inside is the role's own; see `RoleRandomness`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own attention on the local heads."""
        randomness = self.cut.randomness
        if randomness is None or not self.training:
            return super().forward(*args, **kwargs)
        with randomness:
            return super().forward(*args, **kwargs)


class SharedDropout(CutModule):
    """Drops activations that all roles hold, wherever it stands: the roles draw one mask."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape, the same on all roles. Local."""
        with RoleRandomness.paused():
            return super().forward(x)


class RoleDropout(CutModule):
    """Drops features that are cut: each role draws for its own, and they go on in the same state afterwards."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., local features). Local."""
        if not self.training:
            return x
        with RoleRandomness(self.cut.role):
            return super().forward(x)


def swap_module(root: nn.Module, rule: ModuleRule, at: Coordinates, mesh: DeviceMesh) -> None:
    """Make one module act on its role's part.

    Args:
        root: the module that the rule's names are relative to.
        rule: what becomes of which module.
        at: where this worker stands.
        mesh: the tp axis.

    Raises:
        UnsupportedModelError: the module has an option that does not work on a part of its features.

    Local.
    """
    module = root.get_submodule(rule.fqn)
    match rule.style:
        case Style.COLUMN:
            state = become(module, Column, mesh, at.role)
            _prepare_column(module, rule, at, state)
        case Style.ROW:
            state = become(module, Row, mesh, at.role)
        case Style.ATTENTION:
            state = become(module, Attention, mesh, at.role)
            _prepare_attention(root, module, rule, at, state)
        case Style.SHARED_DROPOUT:
            state = become(module, SharedDropout, mesh, at.role)
        case Style.ROLE_DROPOUT:
            state = become(module, RoleDropout, mesh, at.role)
        case Style.VOCAB_EMBEDDING:
            state = become(module, VocabEmbedding, mesh, at.role)
            prepare_vocab(module, rule, at, state)
        case Style.VOCAB_HEAD:
            state = become(module, VocabHead, mesh, at.role)
            prepare_vocab(module, rule, at, state)
    for name, layouts in rule.local_sizes:
        set_local(module, state, name, _local_size(layouts, at))


def _local_size(layouts: NestedLayouts, at: Coordinates) -> int:
    return layouts.at(at.degree, at.relief).local_size(at.role)


def _prepare_column(module: nn.Module, rule: ModuleRule, at: Coordinates, state: CutState) -> None:
    if rule.layouts is None:
        raise UnsupportedModelError(f"{rule.fqn}: a column rule without layouts; give its output features' layouts")
    if isinstance(module, nn.Linear):
        set_local(module, state, "out_features", _local_size(rule.layouts, at))
    seat = at.degree, at.role, at.relief
    if rule.heads is None or not rule.kv_features or rule.heads.uniform_group(*seat) is not None:
        return
    heads = rule.heads
    state.expansion = torch.tensor(heads.expansion(*seat), dtype=torch.long, device=state.mesh.device_type)
    state.head_dim = heads.head_dim
    packed = rule.layouts.size > heads.keys.size * heads.head_dim
    state.query_features = _local_size(heads.queries, at) * heads.head_dim if packed else 0


def _prepare_attention(root: nn.Module, module: nn.Module, rule: ModuleRule, at: Coordinates, state: CutState) -> None:
    if rule.heads is None:
        raise UnsupportedModelError(f"{rule.fqn}: an attention rule without heads; give a HeadCut")
    seat = at.degree, at.role, at.relief
    if hasattr(module, "num_key_value_groups"):
        set_local(module, state, "num_key_value_groups", rule.heads.uniform_group(*seat) or 1)
    for name in rule.key_counts:
        set_local(module, state, name, rule.heads.visible_keys(*seat))
    if rule.local_config:
        config = copy.copy(module.config)
        set_local(module, state, "config", config)
        for name, layouts in rule.local_config:
            setattr(config, name, _local_size(layouts, at))
    if at.degree > 1 and _has_dropout(module):
        state.randomness = RoleRandomness(state.role)
        if rule.output_projection:
            output = root.get_submodule(rule.output_projection)
            if isinstance(output, CutModule):
                output.cut.randomness = state.randomness
            else:
                raise UnsupportedModelError(f"{rule.output_projection}: its rule must come before that of {rule.fqn}")


def _has_dropout(module: nn.Module) -> bool:
    if getattr(module, "attention_dropout", 0.0):
        return True
    return any(child.p > 0 for child in module.modules() if isinstance(child, nn.Dropout))
