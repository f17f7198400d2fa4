"""LazyHeap against a sorted list."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from paged_backend.lazy_heap import LazyHeap

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 20), st.integers(0, 5)),
        st.tuples(st.just("discard"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, 25), st.just(0)),
    ),
    max_size=300,
)


@given(OPERATIONS)
def test_items_come_by_key_and_id_whatever_was_removed(operations):
    heap, model = LazyHeap(), {}
    for operation, id, key in operations:
        if operation == "push":
            heap.push(id, key, f"item {id}")
            model[id] = key
        elif operation == "discard":
            heap.discard(id)
            model.pop(id, None)
        else:
            expected = sorted(model, key=lambda id: (model[id], id))
            assert list(islice(heap.ascending(), id)) == [f"item {n}" for n in expected[:id]]
            assert heap.first() == ((model[expected[0]], f"item {expected[0]}") if expected else None)
        assert len(heap) == len(model)
        assert (id in heap) == (id in model)


def test_items_may_come_and_go_while_others_are_looked_at():
    heap = LazyHeap()
    for n in (1, 3, 5):
        heap.push(n, n, n)
    seen = []
    for item in heap.ascending():
        seen.append(item)
        if item == 1:
            heap.discard(3)
            heap.push(4, 4, 4)
            heap.discard(1)
    assert seen == [1, 4, 5]
    assert list(heap.ascending()) == [4, 5]


def test_removed_items_do_not_pile_up():
    heap = LazyHeap()
    heap.push(0, 0, None)
    for n in range(1, 10_000):
        heap.push(n, n, None)
        heap.discard(n)
    assert len(heap._heap) < 200
