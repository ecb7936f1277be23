"""Nested layouts against their definition: exactly once, balanced, minimal movement."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.errors import ConfigError
from lightning_ntp.layout import (
    NestedLayouts,
    ShardLayout,
    Span,
    intersect,
    nested_layouts,
    slice_storage,
    spans_of,
    subtract,
)


def indices(spans):
    return [index for span in spans for index in range(span.start, span.stop)]


@st.composite
def nested_cases(draw):
    num_roles = draw(st.integers(1, 9))
    order = draw(st.permutations(range(num_roles)))[: draw(st.integers(0, num_roles - 1))]
    return draw(st.integers(1, 70)), num_roles, tuple(order)


def check_chain(num_granules, num_roles, order):
    nested = nested_layouts(num_granules, num_roles, order)
    for layout in nested:
        stored = sorted(itertools.chain.from_iterable(indices(layout.of(role)) for role in layout.roles))
        assert stored == list(range(num_granules))
        assert max(layout.local_size(role) for role in layout.roles) == -(-num_granules // layout.degree)
    for lost, (old, new) in zip(order, itertools.pairwise(nested.layouts), strict=True):
        assert set(old.roles) - set(new.roles) == {lost}
        for role in new.roles:
            kept = indices(old.of(role))
            assert indices(new.of(role))[: len(kept)] == kept, "a survivor's granules stay where they are"
            assert set(indices(new.of(role))[len(kept) :]) <= set(indices(old.of(lost)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4), 3)))
def test_six_heads_over_four_roles_for_every_loss_order(order):
    check_chain(6, 4, order)


@given(nested_cases())
def test_every_chain_is_exact_balanced_and_minimal(case):
    check_chain(*case)


def dealt_one_by_one(layout, lost):
    loads = {role: layout.local_size(role) for role in layout.roles if role != lost}
    for _ in range(layout.local_size(lost)):
        loads[min(loads, key=lambda role: (loads[role], role))] += 1
    return loads


@given(nested_cases())
def test_counts_are_those_of_dealing_one_by_one(case):
    nested = nested_layouts(*case)
    for lost, (old, new) in zip(case[2], itertools.pairwise(nested.layouts), strict=True):
        assert {role: new.local_size(role) for role in new.roles} == dealt_one_by_one(old, lost)


@st.composite
def reliefs(draw):
    granules, num_roles, order = draw(nested_cases())
    nested = nested_layouts(granules, num_roles, order)
    layout = draw(st.sampled_from(nested.layouts))
    slow = draw(st.lists(st.sampled_from(layout.roles), unique=True, max_size=layout.degree - 1))
    return nested, layout, tuple((role, draw(st.integers(0, 1000))) for role in sorted(slow))


@given(reliefs())
def test_who_is_relieved_keeps_the_first_granules_and_the_others_share_the_rest_evenly(case):
    nested, layout, relief = case
    relieved = nested.at(layout.degree, relief)
    stored = sorted(itertools.chain.from_iterable(indices(relieved.of(role)) for role in relieved.roles))
    assert stored == list(range(layout.size)) and relieved.roles == layout.roles
    slow = dict(relief)
    for role in layout.roles:
        before, after = indices(layout.of(role)), indices(relieved.of(role))
        if role in slow:
            assert after == before[: len(after)] and (after or not before)
            assert abs(len(after) - len(before) * slow[role] / 1000) <= (1 if before else 0)
        else:
            assert after[: len(before)] == before, "a neighbour's own granules stay where they are"
    loads = [relieved.local_size(role) for role in layout.roles if role not in slow]
    moved = layout.size - sum(len(set(indices(layout.of(r))) & set(indices(relieved.of(r)))) for r in layout.roles)
    assert moved == sum(layout.local_size(role) - relieved.local_size(role) for role in slow)
    assert max(loads) - min(loads) <= 1 or not moved


@given(reliefs(), st.integers(2, 4))
def test_relief_moves_whole_granules_in_every_layout_that_is_derived_from_them(case, factor):
    nested, layout, relief = case
    wanted = nested.at(layout.degree, relief)
    assert nested.scaled(factor).at(layout.degree, relief) == wanted.scaled(factor)
    packed = NestedLayouts.concat((nested, nested.scaled(factor)))
    assert packed.at(layout.degree, relief) == ShardLayout.concat((wanted, wanted.scaled(factor)))
    if nested.size % factor == 0:
        assert nested.grouped(factor).at(layout.degree, relief) == wanted.grouped(factor)


@pytest.mark.parametrize("relief", [((5, 500),), ((0, 500), (1, 500), (2, 500)), ((0, 1001),)])
def test_relief_that_cannot_be_is_refused(relief):
    with pytest.raises(ConfigError, match=r"relief names some of the roles \(0, 1, 2\)"):
        nested_layouts(6, 3).at(3, relief)


@given(nested_cases(), st.integers(1, 5))
def test_scaling_repeats_each_granule(case, granule):
    nested = nested_layouts(*case)
    for small, large in zip(nested, nested.scaled(granule), strict=True):
        for role in small.roles:
            grown = [g * granule + i for g in indices(small.of(role)) for i in range(granule)]
            assert indices(large.of(role)) == grown


@given(nested_cases(), st.integers(1, 4))
def test_kv_layout_holds_the_group_of_each_query_and_one_owner(case, group_size):
    num_groups, num_roles, order = case
    queries = nested_layouts(num_groups * group_size, num_roles, order)
    for heads, groups in zip(queries, queries.grouped(group_size), strict=True):
        owners = []
        for role in heads.roles:
            assert indices(groups.of(role)) == list(dict.fromkeys(h // group_size for h in indices(heads.of(role))))
            owners += indices(groups.owned(role))
            lower = {g for other in heads.roles if other < role for g in indices(groups.of(other))}
            assert not lower & set(indices(groups.owned(role)))
        assert sorted(owners) == list(range(num_groups))


def test_packed_parts_follow_each_other():
    heads = nested_layouts(3, 2, (0,))
    packed = NestedLayouts.concat([heads.scaled(2), heads])
    assert indices(packed[2].of(0)) == [0, 1, 2, 3, 6, 7]
    assert indices(packed[2].of(1)) == [4, 5, 8]
    assert packed.size == 9


spans_strategy = st.lists(st.integers(0, 40), unique=True, max_size=25).map(spans_of)


@given(spans_strategy, spans_strategy)
def test_span_arithmetic_agrees_with_lists(first, second):
    a, b = indices(first), indices(second)
    assert indices(subtract(first, second)) == [i for i in a if i not in b]
    common = [(i, a.index(i), b.index(i)) for i in a if i in b]
    found = [
        (o.span.start + i, o.first_offset + i, o.second_offset + i)
        for o in intersect(first, second)
        for i in range(len(o.span))
    ]
    assert found == common


@given(spans_strategy, st.integers(0, 30), st.integers(0, 30))
def test_slice_storage_is_list_slicing(spans, start, length):
    assert indices(slice_storage(spans, start, start + length)) == indices(spans)[start : start + length]


def test_repr_and_digest_can_be_thought_with():
    nested = nested_layouts(6, 4, (1,))
    assert repr(nested[4]) == "ShardLayout(6, 0: [0:2); 1: [2:4); 2: [4:5); 3: [5:6))"
    assert nested.digest == nested_layouts(6, 4, (1,)).digest != nested_layouts(6, 4, (2,)).digest


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Span(3, 3), r"0 <= start < stop, got \[3:3\)"),
        (lambda: nested_layouts(0, 2), "at least 1 granule and 1 role, got 0 and 2"),
        (lambda: nested_layouts(4, 2, (0, 1)), "leave at least one"),
        (lambda: nested_layouts(4, 3, (0, 0)), "distinct roles of 0..2"),
        (lambda: nested_layouts(4, 3)[2], "degree 2 is outside the planned degrees 3 to 3"),
        (lambda: nested_layouts(7, 3).grouped(2), "do not form groups of 2"),
        (lambda: ShardLayout(3, ((0, (Span(0, 2),)),)), r"no role stores \[2:3\) of a dim of 3"),
        (lambda: ShardLayout(3, ((0, (Span(0, 4),)),)), r"past the end of a dim of 3"),
        (lambda: ShardLayout(3, ((0, (Span(0, 2), Span(1, 3))),)), "twice"),
        (lambda: ShardLayout(2, ((1, (Span(0, 1),)), (0, (Span(1, 2),)))), r"ascending order, got \[1, 0\]"),
        (lambda: ShardLayout.balanced(4, 2).of(5), r"role 5 is not in this layout; it has roles \(0, 1\)"),
    ],
)
def test_bad_input_says_what_is_wrong(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_another_loss_order_is_derived_as_the_first_one_was(first, second):
    def cut(order):
        heads = nested_layouts(6, 4, order[:3])
        keys = heads.grouped(3).scaled(2)
        return [heads, keys, NestedLayouts.concat((heads.scaled(2), keys, keys))]

    for old, new in zip(cut(first), cut(second), strict=True):
        assert old.reordered(second[:3]) == new
        assert old.reordered(second[:3]).reordered(first[:3]) == old
