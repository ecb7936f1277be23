"""What the leader says before step 1."""

from types import SimpleNamespace
from unittest import mock

import pytest
from lightning.pytorch.utilities import rank_zero

from lightning_ntp.strategy.screen import batch_line, say_batches


def test_the_batch_line_multiplies_out():
    assert batch_line(4, 3, 2) == (
        "[ntp] global batch 24 = batch_size 4 x 3 data row(s) x 2 accumulated; micro-batches of at most 4"
    )


@pytest.mark.parametrize(("leads", "batch_size", "said"), [(True, 4, 1), (False, 4, 0), (True, None, 0)])
def test_only_the_leader_speaks_and_only_of_what_is_known(leads, batch_size, said):
    strategy = SimpleNamespace(is_global_zero=leads, framework="lightning.pytorch")
    with mock.patch.object(rank_zero, "rank_zero_info") as info:
        say_batches(strategy, batch_size, 2, 1)
    assert info.call_count == said
