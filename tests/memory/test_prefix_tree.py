"""The tree finds the longest known prefix, and keeps no node that leads nowhere."""

from __future__ import annotations

from paged_backend.memory.prefix_tree import PrefixNode, PrefixTree, prefix_contents


def path_of(tree: PrefixTree, tokens: list[int], salt: str | None = None) -> list[PrefixNode]:
    """The nodes of full blocks of ``tokens``, made where they are new."""
    node, path = tree.root(salt), []
    for start in range(0, len(tokens), tree.block_size):
        node = tree.child(node, tuple(tokens[start : start + tree.block_size]))
        path.append(node)
    return path


def hold(tree: PrefixTree, path: list[PrefixNode], group: int = 0) -> None:
    for block, node in enumerate(path):
        tree.hold(node, group, block)


def test_the_longest_known_prefix_is_found_block_by_block():
    tree = PrefixTree(1, 2)
    path = path_of(tree, [1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 9, 9], None, 3) == path[:2]
    assert tree.match([1, 2, 3, 4, 5, 6], None, 2) == path[:2]
    assert tree.match([9, 2, 3, 4], None, 2) == []
    assert tree.match([1, 2], None, 0) == []


def test_salts_have_trees_of_their_own():
    tree = PrefixTree(1, 2)
    path = path_of(tree, [1, 2], "a")
    assert tree.match([1, 2], "a", 1) == path
    assert tree.match([1, 2], None, 1) == tree.match([1, 2], "b", 1) == []


def test_a_node_is_made_once_and_knows_its_depth_and_age():
    tree = PrefixTree(2, 2)
    first = path_of(tree, [1, 2, 3, 4])
    assert path_of(tree, [1, 2, 3, 4]) == first
    (_, other) = path_of(tree, [1, 2, 5, 6])
    assert [(node.depth, node.created) for node in (*first, other)] == [(1, 1), (2, 2), (2, 3)]


def test_held_children_are_counted_per_group():
    tree = PrefixTree(2, 1)
    parent, child = path_of(tree, [1, 2])
    hold(tree, [parent, child], group=1)
    assert (tree.root(None).held_children, parent.held_children) == ([0, 1], [0, 1])
    tree.forget(child, 1)
    assert (parent.held_children, tree.nodes()) == ([0, 0], [parent])


def test_a_node_goes_with_its_last_block_and_takes_along_what_then_leads_nowhere():
    tree = PrefixTree(1, 1)
    path = path_of(tree, [1, 2, 3])
    hold(tree, path)
    tree.forget(path[0], 0)
    tree.forget(path[1], 0)
    # Both still lead to the last.
    assert tree.nodes() == path
    tree.forget(path[2], 0)
    assert tree.nodes() == []
    assert [node.parent for node in path] == [None, None, None]


def test_a_node_stays_while_another_group_holds_it_or_a_pin_does():
    tree = PrefixTree(2, 1)
    (node,) = path_of(tree, [1])
    tree.hold(node, 0, 7)
    tree.hold(node, 1, 8)
    node.pins[1] = 1
    for group in (0, 1):
        tree.forget(node, group)
        assert tree.nodes() == [node]
    node.pins[1] = 0
    tree.prune(node)
    assert tree.nodes() == []


def test_a_dropped_node_does_not_take_its_successor_along():
    tree = PrefixTree(1, 1)
    (old,) = path_of(tree, [1])
    tree.prune(old)
    (new,) = path_of(tree, [1])
    hold(tree, [new])
    tree.prune(old)
    assert tree.match([1], None, 1) == [new]


def test_the_deepest_node_that_holds_is_found_in_few_looks():
    tree = PrefixTree(1, 1)
    path = path_of(tree, list(range(1000)))
    for depth in (0, 1, 2, 17, 511, 999, 1000):
        looks = []

        def reaches(node, depth=depth, looks=looks):
            looks.append(node)
            return node.depth <= depth

        found = path[-1].deepest(reaches)
        assert found is (path[depth - 1] if depth else tree.root(None))
        assert len(looks) < 60


def test_nodes_come_parents_first_and_all_are_gone_after_clearing():
    tree = PrefixTree(1, 1)
    path_of(tree, [1, 2, 3])
    path_of(tree, [1, 4], "a")
    depths = [node.depth for node in tree.nodes()]
    assert sorted(depths) == [1, 1, 2, 2, 3]
    assert all(node.depth == 1 or node.parent in tree.nodes()[:index] for index, node in enumerate(tree.nodes()))
    tree.clear()
    assert tree.nodes() == tree.match([1], None, 1) == []


def test_the_contents_of_a_prompt_are_those_of_its_nodes_as_far_as_blocks_are_full():
    tree = PrefixTree(1, 2)
    path = path_of(tree, [1, 2, 3, 4], "a")
    assert list(prefix_contents([1, 2, 3, 4, 5], 5, "a", 2)) == [node.contents for node in path]
    assert list(prefix_contents([1, 2, 3, 4], 3, "a", 2)) == [path[0].contents]
    assert not {*prefix_contents([1, 2, 3, 4], 4, None, 2)} & {node.contents for node in path}
