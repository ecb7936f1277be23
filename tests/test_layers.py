"""Layers cut over roles against the same layers in one process, module by module, float64."""

from collections import Counter

import pytest
import torch
import torch._dynamo.utils as dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_ntp.dtensor.cut import CutModule, restore_module
from lightning_ntp.dtensor.parallel import swap_module
from lightning_ntp.dtensor.placement import UnevenShard, wrap_local
from lightning_ntp.dtensor.randomness import RoleRandomness
from lightning_ntp.dtensor.vocab import causal_lm_loss, connect_head
from lightning_ntp.errors import ConfigError, UnsupportedModelError
from lightning_ntp.layout import NestedLayouts, nested_layouts
from lightning_ntp.model_spec import Coordinates, HeadCut, ModuleRule, ParamSpec, Style
from lightning_ntp.strategy.fsdp import local_of, local_shape, shard_model, take_cell
from lightning_ntp.strategy.groups import Groups
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.topology import Topology
from tests.models import IGNORED, batch, float64_norms, randomize, tiny

EXACT = 1e-12


class Cutter:
    """Swaps modules of one root and cuts their parameters; remembers how, to compare gradients."""

    def __init__(self, root, rank, world):
        self.root, self.role, self.degree = root, rank, world
        self.mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        self.specs = {}

    def rule(self, fqn, style, layouts=None, dims=None, **options):
        """One module's rule; `dims` says which dim of which of its parameters is cut."""
        swap_module(self.root, ModuleRule(fqn, style, layouts, **options), Coordinates(self.degree, self.role, 1, 0), self.mesh)
        owner = self.root.get_submodule(fqn)
        for name, dim in (dims or {}).items():
            whole = owner.get_parameter(name)
            spec = ParamSpec(f"{fqn}.{name}", tuple(whole.shape), dim, layouts)
            cell = spec.role_cell(self.degree, self.role)
            local = take_cell(whole, spec, cell).view(local_shape(spec, cell))
            cut = wrap_local(local, self.mesh, UnevenShard(dim, layouts[self.degree]), whole.shape)
            setattr(owner, name, nn.Parameter(cut))
            self.specs[spec.fqn] = spec

    def gradient_errors(self, twin):
        """Summed absolute error of this role's part of each gradient; that of a replicated parameter must be whole."""
        errors = {}
        for name, parameter in self.root.named_parameters():
            wanted, got = twin.get_parameter(name).grad, local_of(parameter.grad)
            if name in self.specs:
                spec = self.specs[name]
                wanted = take_cell(wanted, spec, spec.role_cell(self.degree, self.role)).view(got.shape)
            errors[name] = (got - wanted).abs().sum().item()
        return errors


def compare(cutter, twin, forward, x):
    """Errors of the output, of the input's gradient and of all parameters' gradients."""
    results = []
    for model in (cutter.root, twin):
        entry = x.clone().requires_grad_()
        y = forward(model, entry)
        (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        results.append((y.detach(), entry.grad))
    (y, gradient), (wanted, wanted_gradient) = results
    errors = {"output": (y - wanted).abs().max().item(), "input": (gradient - wanted_gradient).abs().max().item()}
    return errors | cutter.gradient_errors(twin)


def made(make):
    """Two equal models in float64 with every parameter random."""
    pair = make().double(), make().double()
    for model in pair:
        randomize(model)
    return pair


def random_input(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def feed_forward(rank, world, ffn, kind):
    def make():
        if kind == "conv1d":
            return nn.ModuleDict({"up": Conv1D(ffn, 12), "down": Conv1D(12, ffn)})
        width, bias = 2 * ffn if kind == "packed" else ffn, kind != "plain"
        return nn.ModuleDict({"up": nn.Linear(12, width, bias), "down": nn.Linear(ffn, 12, bias)})

    def forward(model, x):
        hidden = model["up"](x)
        if kind == "packed":
            gate, hidden = hidden.chunk(2, dim=-1)
            return model["down"](F.silu(gate) * hidden)
        return model["down"](F.gelu(hidden))

    model, twin = made(make)
    cutter, layouts = Cutter(model, rank, world), nested_layouts(ffn, world)
    out, into = (1, 0) if kind == "conv1d" else (0, 1)
    bias = {} if kind == "plain" else {"bias": 0}
    wide = NestedLayouts.concat((layouts, layouts)) if kind == "packed" else layouts
    cutter.rule("up", Style.COLUMN, wide, {"weight": out} | bias)
    cutter.rule("down", Style.ROW, layouts, {"weight": into})
    return compare(cutter, twin, forward, random_input(2, 3, 12))


@pytest.mark.parametrize("kind", ["plain", "bias", "conv1d", "packed"])
@pytest.mark.parametrize(("world", "ffn"), [(3, 11), (4, 97), (4, 4)])
def test_column_then_row(pool, world, ffn, kind):
    """The row bias counts once, whatever the degree, and its gradient is whole on every role."""
    for errors in pool.run(feed_forward, world, ffn, kind):
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}


class Heads(nn.Module):
    """q, k, v and o, separate or packed; every KV head serves `group` query heads."""

    def __init__(self, num_queries, num_keys, head_dim, packed):
        super().__init__()
        self.num_heads, self.num_key_value_groups, self.head_dim = num_queries, num_queries // num_keys, head_dim
        width, keys = num_queries * head_dim, num_keys * head_dim
        if packed:
            self.qkv_proj = nn.Linear(10, width + 2 * keys)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(10, width), nn.Linear(10, keys), nn.Linear(10, keys)
        self.o_proj = nn.Linear(width, 10)

    def forward(self, x):
        if hasattr(self, "qkv_proj"):
            packed = self.qkv_proj(x)
            width = self.num_heads * self.head_dim
            q, rest = packed[..., :width], packed[..., width:]
            k, v = rest.chunk(2, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (q, k, v))
        k, v = (one.repeat_interleave(self.num_key_value_groups, dim=1) for one in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def attention(rank, world, num_queries, num_keys, packed):
    model, twin = made(lambda: nn.ModuleDict({"attn": Heads(num_queries, num_keys, 2, packed)}))
    cutter, queries = Cutter(model, rank, world), nested_layouts(num_queries, world)
    heads = HeadCut(queries, num_queries // num_keys, 2)
    wide, keys, both = queries.scaled(2), heads.keys.scaled(2), {"weight": 0, "bias": 0}
    if packed:
        layouts = NestedLayouts.concat((wide, keys, keys))
        cutter.rule("attn.qkv_proj", Style.COLUMN, layouts, both, heads=heads, kv_features=True)
    else:
        cutter.rule("attn.q_proj", Style.COLUMN, wide, both)
        for name in ("k_proj", "v_proj"):
            cutter.rule(f"attn.{name}", Style.COLUMN, keys, both, heads=heads, kv_features=True)
    cutter.rule("attn.o_proj", Style.ROW, wide, {"weight": 1})
    sizes = (("num_heads", queries),)
    cutter.rule("attn", Style.ATTENTION, heads=heads, local_sizes=sizes, output_projection="attn.o_proj")
    x = random_input(2, 5, 10)
    errors = compare(cutter, twin, lambda model, x: model["attn"](x), x)
    return errors, heads.uniform_group(world, rank), _copies(cutter, heads)


def _copies(cutter, heads):
    """On how many roles a KV head is stored at most; gradients of copies are partial until the bucket sync adds them."""
    layout = heads.keys[cutter.degree]
    counts = Counter(i for role in layout.roles for s in layout.of(role) for i in range(s.start, s.stop))
    return max(counts.values())


KEYS = ("k_proj", "v_proj", "qkv_proj")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("world", "num_queries", "num_keys"), [(3, 14, 2), (3, 6, 6), (4, 6, 3)])
def test_attention_by_query_head(pool, world, num_queries, num_keys, packed):
    reports = pool.run(attention, world, num_queries, num_keys, packed)
    for errors, _, copies in reports:
        partial = {name for name in errors if copies > 1 and any(key in name for key in KEYS)}
        assert {name: error for name, error in errors.items() if name not in partial and not error < 1e-10} == {}
    if num_queries == 14:
        assert None in [group for _, group, _ in reports], "no role had to repeat KV heads one by one"


def copied_keys(rank, world):
    """The sum over roles of a KV copy's gradients, against the whole layer's."""
    model, twin = made(lambda: nn.ModuleDict({"attn": Heads(14, 2, 2, packed=False)}))
    cutter, queries = Cutter(model, rank, world), nested_layouts(14, world)
    heads = HeadCut(queries, 7, 2)
    keys, both = heads.keys.scaled(2), {"weight": 0, "bias": 0}
    cutter.rule("attn.q_proj", Style.COLUMN, queries.scaled(2), both)
    for name in ("k_proj", "v_proj"):
        cutter.rule(f"attn.{name}", Style.COLUMN, keys, both, heads=heads, kv_features=True)
    cutter.rule("attn.o_proj", Style.ROW, queries.scaled(2), {"weight": 1})
    cutter.rule("attn", Style.ATTENTION, heads=heads, output_projection="attn.o_proj")
    compare(cutter, twin, lambda model, x: model["attn"](x), random_input(2, 5, 10))
    errors = {}
    for name in ("attn.k_proj.weight", "attn.v_proj.weight"):
        total = torch.zeros_like(twin.get_parameter(name).grad)
        stored = [i for s in keys[world].of(rank) for i in range(s.start, s.stop)]
        total[stored] = local_of(model.get_parameter(name).grad)
        dist.all_reduce(total)
        errors[name] = (total - twin.get_parameter(name).grad).abs().max().item()
    return errors


def test_gradients_of_key_value_copies_add_up(pool):
    for errors in pool.run(copied_keys, 3):
        assert all(error < 1e-10 for error in errors.values()), errors


def embedding(rank, world, rows, padding_idx):
    model, twin = made(lambda: nn.ModuleDict({"table": nn.Embedding(rows, 6, padding_idx=padding_idx)}))
    cutter = Cutter(model, rank, world)
    cutter.rule("table", Style.VOCAB_EMBEDDING, nested_layouts(rows, world), {"weight": 0})
    ids = torch.randint(rows, (3, 40), generator=torch.Generator().manual_seed(2))
    ids[0, 0] = padding_idx or 0
    outputs = [one["table"](ids) for one in (model, twin)]
    for y in outputs:
        (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"output": (outputs[0] - outputs[1]).abs().max().item()} | cutter.gradient_errors(twin)


@pytest.mark.parametrize(("world", "rows", "padding_idx"), [(3, 101, None), (3, 101, 100), (4, 101, 0), (3, 2, 1)])
def test_embedding_cut_by_rows(pool, world, rows, padding_idx):
    """A role without any row (2 rows over 3 roles) takes part as well."""
    for errors in pool.run(embedding, world, rows, padding_idx):
        assert {name: error for name, error in errors.items() if not error < EXACT} == {}


class Speaker(nn.Module):
    """The part of a causal LM that its head and loss are connected to."""

    def __init__(self, vocabulary):
        super().__init__()
        self.lm_head = nn.Linear(6, vocabulary)

    def forward(self, x, labels=None):
        logits = self.lm_head(x)
        return logits, None if labels is None else self.loss_function(logits, labels)


def spoken(rank, world, vocabulary):
    model, twin = made(lambda: Speaker(vocabulary))
    cutter = Cutter(model, rank, world)
    cutter.rule("lm_head", Style.VOCAB_HEAD, nested_layouts(vocabulary, world), {"weight": 0, "bias": 0})
    connect_head(model, model.lm_head)
    x, found = random_input(2, 5, 6), {}
    labels = torch.randint(vocabulary, (2, 5), generator=torch.Generator().manual_seed(4))
    labels[0, 2] = IGNORED
    wanted = F.cross_entropy(twin(x)[0][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    wanted.backward()
    wanted = wanted.detach()
    logits, loss = model(x, labels=labels)
    loss.backward()
    found["cut in training"] = isinstance(logits, DTensor) and logits.to_local().shape[-1] <= -(-vocabulary // world)
    found["loss"] = (loss - wanted).abs().item()
    found |= cutter.gradient_errors(twin)
    model.eval()
    whole = model(x)[0]
    found["whole in eval"] = type(whole) is torch.Tensor and (whole - twin(x)[0]).abs().max().item() < EXACT
    found["cut with labels"] = isinstance(model(x, labels=labels)[0], DTensor)
    found["loss on whole logits"] = (causal_lm_loss(model.lm_head, whole, labels) - wanted).abs().item()
    count = (labels[:, 1:] != IGNORED).sum()
    share = causal_lm_loss(model.lm_head, whole, labels, num_items_in_batch=2 * count)
    found["sum over a given count"] = (share - wanted / 2).abs().item()
    low = causal_lm_loss(model.lm_head, whole.bfloat16(), labels)
    found["16 bits are lifted"] = low.dtype is torch.float32 and (low - wanted).abs().item() < 0.05
    try:
        causal_lm_loss(model.lm_head, whole, None)
    except ConfigError as error:
        found["message"] = str(error)
    return found


@pytest.mark.parametrize(("world", "vocabulary"), [(1, 7), (3, 101), (4, 101), (3, 2)])
def test_head_and_loss(pool, world, vocabulary):
    """2 rows over 3 roles: one role has no logits at all."""
    for found in pool.run(spoken, world, vocabulary):
        assert "needs labels or shift_labels" in found.pop("message")
        for what in ("cut in training", "whole in eval", "cut with labels", "16 bits are lifted"):
            assert found.pop(what), what
        assert {name: error for name, error in found.items() if not error < EXACT} == {}


def nothing_counts(rank, world):
    model, _ = made(lambda: Speaker(11))
    cutter = Cutter(model, rank, world)
    cutter.rule("lm_head", Style.VOCAB_HEAD, nested_layouts(11, world), {"weight": 0, "bias": 0})
    connect_head(model, model.lm_head)
    x = random_input(2, 5, 6).requires_grad_()
    loss = model(x, labels=torch.full((2, 5), IGNORED))[1]
    loss.backward()
    gradients = [x.grad, *(local_of(p.grad) for p in model.parameters())]
    return loss.isnan().item(), [gradient.abs().max().item() for gradient in gradients]


def test_without_counted_tokens_the_loss_is_nan_and_the_gradient_zero(pool):
    for is_nan, gradients in pool.run(nothing_counts, 3):
        assert is_nan
        assert gradients == [0.0, 0.0, 0.0]


def swapped_and_back(rank, world):
    model = tiny("gpt2")
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    plan = plan_model(model, 3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for rule in sorted(plan.rules, key=lambda rule: rule.style is Style.ATTENTION):
        swap_module(model, rule, Coordinates(3, 0, 1, 0), mesh)
    originals = all(isinstance(model.get_submodule(rule.fqn), before[rule.fqn][0]) for rule in plan.rules)
    changed = [rule.fqn for rule in plan.rules if isinstance(model.get_submodule(rule.fqn), CutModule)]
    heads = model.transformer.h[0].attn.num_heads
    for module in model.modules():
        restore_module(module)
    wrong = [
        name
        for name, module in model.named_modules()
        if (type(module), vars(module).keys()) != (before[name][0], before[name][1].keys())
        or any(vars(module)[key] is not value for key, value in before[name][1].items() if isinstance(value, int))
    ]
    return len(changed) == len(plan.rules), originals, heads, model.transformer.h[0].attn.num_heads, wrong


def test_a_swap_can_be_undone(pool):
    assert pool.run(swapped_and_back, 1) == [(True, True, 2, 6, [])]


def refusals(rank, world):
    root = nn.ModuleDict({"table": nn.Embedding(9, 4, max_norm=1.0), "up": nn.Linear(4, 9), "attn": nn.Module()})
    mesh, messages = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), []
    for rule in (
        ModuleRule("table", Style.VOCAB_EMBEDDING, nested_layouts(9, 1)),
        ModuleRule("table", Style.VOCAB_EMBEDDING),
        ModuleRule("up", Style.COLUMN),
        ModuleRule("attn", Style.ATTENTION),
    ):
        try:
            swap_module(root, rule, Coordinates(1, 0, 1, 0), mesh)
        except UnsupportedModelError as error:
            messages.append(str(error))
    return messages


def test_rules_that_cannot_work_say_why(pool):
    (messages,) = pool.run(refusals, 1)
    wanted = ["max_norm does not work on a part", "give the vocabulary's layouts", "output features' layouts", "HeadCut"]
    assert len(messages) == len(wanted)
    assert all(part in message for part, message in zip(wanted, messages, strict=True))


def masks(rank, world, leave_early):
    """What a role draws inside a region, twice, and what all roles draw after it."""
    torch.manual_seed(7)
    region, inside = RoleRandomness(rank), []
    for _ in range(2):
        with region:
            inside.append(torch.rand(2 + rank))  # another count per role, as with uneven heads
            if leave_early:
                region.leave()
                inside.append(torch.rand(3))
    return inside, torch.rand(4), torch.get_rng_state()


@pytest.mark.parametrize("leave_early", [False, True])
def test_role_randomness(pool, leave_early):
    first, second, third = pool.run(masks, 3, leave_early)
    for other in (second, third):
        assert torch.equal(first[1], other[1]), "the shared state differs after the region"
        assert torch.equal(first[2], other[2])
        assert not torch.equal(first[0][0][:2], other[0][0][:2]), "two roles drew one mask"
    if leave_early:
        assert torch.equal(first[0][1], second[0][1]), "what follows the output projection has one mask for all"
    assert not torch.equal(first[0][0], first[0][2 if leave_early else 1]), "two calls drew one mask"


def test_an_error_inside_a_region_puts_the_shared_state_back():
    torch.manual_seed(1)
    wanted = (torch.randint(2**63 - 1, ()), torch.rand(3))[1]
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="user code"), RoleRandomness(2):
        torch.rand(5)
        raise RuntimeError("user code")
    assert torch.equal(torch.rand(3), wanted)


def test_checkpointing_replays_a_region():
    region, drawn = RoleRandomness(1), []

    def forward(x):
        with region:
            y = F.dropout(x, 0.5)
        z = F.dropout(y, 0.5)
        drawn.append((y.detach() != 0, z.detach() != 0))
        return z * z

    x = torch.ones(64, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert len(drawn) == 2
    assert all(torch.equal(one, two) for one, two in zip(*drawn, strict=True))


def graphs():
    """(graphs, graph breaks) since the counters were cleared."""
    return dynamo.counters["stats"]["unique_graphs"], sum(dynamo.counters["graph_break"].values())


def compiled_feed_forward(rank, world):
    model, twin = made(lambda: nn.Sequential(nn.Linear(12, 11), nn.GELU(), nn.Linear(11, 12)))
    cutter, layouts = Cutter(model, rank, world), nested_layouts(11, world)
    cutter.rule("0", Style.COLUMN, layouts, {"weight": 0, "bias": 0})
    cutter.rule("2", Style.ROW, layouts, {"weight": 1})
    torch.compiler.reset()
    dynamo.counters.clear()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    errors = compare(cutter, twin, lambda one, x: run(x) if one is model else one(x), random_input(2, 3, 12))
    return errors, graphs()


@pytest.mark.timeout(300)
def test_column_and_row_compile_into_one_graph(pool):
    for errors, counted in pool.run(compiled_feed_forward, 2, timeout=240.0):
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
        assert counted == (1, 0)


def compiled_llama(rank, world, overrides):
    """Gradients of a cut llama before and after each decoder layer is compiled, and graphs per layer."""
    with float64_norms():
        topology = Topology.from_shapes([(1, world)])
        model = tiny("llama", attn_implementation="sdpa", **overrides)
        plan = plan_model(model, world, topology.loss_order)
        sharded = shard_model(model, plan, Groups(topology, rank))
        data, gradients = batch(101, 2, 6), []
        torch.compiler.reset()
        for compiled in (False, True):
            if compiled:
                dynamo.counters.clear()
                for layer in model.model.layers:
                    layer.compile(backend="aot_eager")
            model.zero_grad()
            sharded.begin_window()
            model(**data, use_cache=False).loss.backward()
            gradients.append({spec.fqn: local_of(p.grad).clone() for spec, p in sharded.parameters()})
    eager, got = gradients
    return {name: (got[name] - eager[name]).abs().max().item() for name in eager if eager[name].numel()}, graphs()


@pytest.mark.timeout(300)
def test_a_cut_llama_layer_compiles_into_one_graph(pool):
    heads = {"num_attention_heads": 7, "num_key_value_heads": 1}
    for errors, (num_graphs, breaks) in pool.run(compiled_llama, 2, heads, timeout=240.0):
        assert {name: error for name, error in errors.items() if not error < 1e-10} == {}
        assert breaks == 0
        assert num_graphs == 1, "two layers of one shape share a graph"
