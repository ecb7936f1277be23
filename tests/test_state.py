"""State moves against one process that never lost anything: float64, every parameter and every moment."""

import pytest

from lightning_ntp.topology import Replica, Topology
from tests.lives import Generation, Life, live, lose

TOLERANCE = 1e-10

THREES = Topology.from_shapes([(1, 3), (1, 3)])


def after(*topologies, steps=(2, 3, 2, 2, 2)):
    return [Generation(topology, count) for topology, count in zip(topologies, steps, strict=False)]


R = Replica
LIVES = {
    "relabelled: a role in the middle after another was lost": Life(after(THREES, lose(THREES, 5), lose(THREES, 5, 0))),
    "rank 0": Life(after(THREES, lose(THREES, 0))),
    "two roles of one replica": Life(after(THREES, lose(THREES, 4, 5))),
    "a whole replica": Life(after(THREES, lose(THREES, 3, 4, 5))),
    "3x1 beside 3x1 -> 2x1": Life(
        after(Topology.from_shapes([(3, 1), (3, 1)]), Topology(1, (R(((0,), (1,), (2,))), R(((3,), (5,))))))
    ),
    "2x2 -> 2x1 and a spare, which leads when its replica is lost": Life(
        after(Topology.from_shapes([(2, 2), (2, 2)]), lose(Topology.from_shapes([(2, 2), (2, 2)]), 3))
    ),
    "gpt2, packed and tied": Life(after(THREES, lose(THREES, 4)), "gpt2"),
    "qwen3, tied, partial norms": Life(after(THREES, lose(THREES, 1)), "qwen3", {"tie_word_embeddings": True}),
    "KV copies": Life(
        after(THREES, lose(THREES, 1)),
        overrides={"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 28, "head_dim": 2},
    ),
    "lost and back": Life(after(THREES, lose(THREES, 5), THREES)),
    "a replica lost and back": Life(after(THREES, lose(THREES, 0, 1, 2), THREES)),
    "members in another order": Life(
        [Generation(THREES, 2), Generation(lose(THREES, 1), 2, (2, 0, 3, 5, 4)), Generation(THREES, 2, (5, 2, 0, 3, 4, 1))]
    ),
    "[3,3] -> [3,2]": Life(after(THREES, lose(THREES, 5))),
}


@pytest.mark.parametrize("name", LIVES)
def test_after_a_change_the_job_equals_one_that_never_lost_anything(pool, name):
    life = LIVES[name]
    reports = [report for report in pool.run(live, life.num_workers, life, timeout=60.0) if report and "parameter" in report]
    for report in reports:
        for what in report.keys() - {"moves", "drifted", "look", "steps"}:
            wrong = {fqn: error for fqn, error in report[what].items() if not error < TOLERANCE}
            assert not wrong, what
        assert report["drifted"] == 0
        for move in report["moves"]:
            assert move.seconds < 60
