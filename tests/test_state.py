"""State moves against one process that never lost anything: float64, every parameter and every moment."""

from functools import partial

import pytest
import torch

from lightning_ntp.next_topology import next_topology
from lightning_ntp.plan_cost import PlanCost
from lightning_ntp.presets import GPUS
from lightning_ntp.strategy.huggingface import plan_model
from lightning_ntp.topology import Replica, Topology
from tests.engine import adamw
from tests.lives import Generation, Life, live, lose
from tests.models import tiny

TOLERANCE = 1e-10
THREES = Topology.from_shapes([(1, 3), (1, 3)])
SQUARES = Topology.from_shapes([(2, 2), (2, 2)])
LOST = lose(THREES, 5)
R = Replica


def after(*topologies, steps=(2, 3, 2, 2, 2)):
    return [Generation(topology, count) for topology, count in zip(topologies, steps, strict=False)]


def following(old, lost, joined=(), healthy=THREES, **overrides):
    plan = plan_model(tiny("llama", **overrides), old.num_roles, old.loss_order)
    cost = PlanCost(lambda order: plan.reordered(order).params, old, GPUS["h100"])
    return next_topology(old, lost, joined, healthy=healthy, cost=cost)


def parked_and_used():
    """2x2 loses one, its mate is parked and replaces the next loss of the replica, the first one comes back."""
    one = following(SQUARES, [7], healthy=SQUARES)
    two = following(one, [one.replicas[1].workers[0]], healthy=SQUARES)
    assert one.spares[0] in two.workers
    return after(SQUARES, one, two, following(two, [], [7], healthy=SQUARES))


sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adagrad = partial(torch.optim.Adagrad, lr=0.05)

LIVES = {
    "[3,3] -> [3,2]": Life(after(THREES, LOST)),
    "for-loop AdamW": Life(after(THREES, LOST), make_optimizer=partial(adamw, foreach=False)),
    "fused AdamW with amsgrad": Life(after(THREES, LOST), make_optimizer=partial(adamw, fused=True, amsgrad=True)),
    "SGD with momentum": Life(after(THREES, LOST), make_optimizer=sgd),
    "Adagrad, grown back": Life(after(THREES, LOST, THREES), make_optimizer=adagrad),
    "relabelled: a role that is not next, and back": Life(
        after(THREES, LOST, lose(LOST, 0), following(lose(LOST, 0), [], [0, 5]))
    ),
    "rank 0": Life(after(THREES, lose(THREES, 0))),
    "two roles of one replica": Life(after(THREES, lose(THREES, 4, 5))),
    "a whole replica, and back": Life(after(THREES, lose(THREES, 0, 1, 2), THREES)),
    "3x1 beside 3x1 -> 2x1 and back": Life(
        after(*(two := [Topology.from_shapes([(3, 1), (3, 1)]), Topology(1, (R(((0,), (1,), (2,))), R(((3,), (5,)))))]), two[0])
    ),
    "2x2 -> a spare, which replaces the next loss": Life(parked_and_used()),
    "gpt2, packed and tied": Life(after(THREES, lose(THREES, 4)), "gpt2"),
    "qwen3, tied, partial norms": Life(after(THREES, lose(THREES, 1)), "qwen3", {"tie_word_embeddings": True}),
    "phi3, three losses": Life(after(THREES, LOST, lose(LOST, 4), lose(LOST, 4, 0)), "phi3"),
    "KV copies": Life(
        after(THREES, lose(THREES, 1)),
        overrides={"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 28, "head_dim": 2},
    ),
    "frozen parameters": Life(
        after(THREES, LOST, THREES), frozen=("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
    ),
    "members in another order": Life(
        [Generation(THREES, 2), Generation(lose(THREES, 1), 2, (2, 0, 3, 5, 4)), Generation(THREES, 2, (5, 2, 0, 3, 4, 1))]
    ),
    "one batch for everything": Life(after(THREES, LOST, THREES), batch_bytes=2**26),
}
QUICK = ("[3,3] -> [3,2]", "SGD with momentum", "relabelled: a role that is not next, and back", "2x2 -> a spare, which replaces the next loss", "qwen3, tied, partial norms", "3x1 beside 3x1 -> 2x1 and back", "frozen parameters", "a whole replica, and back")  # fmt: skip


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in LIVES])
def test_after_a_change_the_job_equals_one_that_never_lost_anything(pool, name):
    life = LIVES[name]
    everyone = pool.run(live, life.num_workers, life, timeout=120.0)
    reports = [report for report in everyone if "parameter" in report]
    last = life.generations[-1].topology
    assert len(reports) == len(last.workers)
    for report in reports:
        for what in report.keys() - {"moves", "drifted", "look", "steps"}:
            wrong = {fqn: error for fqn, error in report[what].items() if not error < TOLERANCE}
            assert not wrong, what
        assert report["drifted"] == 0
        assert report["steps"] <= {float(sum(generation.num_steps for generation in life.generations))}
    moves = {move.digest: move for report in everyone for move in report["moves"]}
    assert len(moves) == len(life.generations) - 1, "all workers moved by one plan"
