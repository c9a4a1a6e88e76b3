"""Whether a DAG makes sense, and in which order its nodes may start."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.dag import Frontier, Node, check_dag, dag_problems


def test_everything_wrong_is_listed_at_once() -> None:
    nodes = [
        Node("twice", "copy"),
        Node("twice", "copy"),
        Node("old", "copy"),
        Node("odd", "paste"),
        Node("orphan", "copy", needs=("gone", "gone")),
        Node("x", "copy", needs=("y",)),
        Node("y", "copy", needs=("z", "old")),
        Node("z", "copy", needs=("x",)),
        Node("after", "copy", needs=("x",)),
    ]
    with pytest.raises(ValueError) as caught:
        check_dag(nodes, kinds={"copy"}, known={"old"})
    assert str(caught.value).splitlines() == [
        "the DAG cannot run:",
        "  node 'twice' is given 2 times",
        "  node 'old' ran before: choose another id",
        "  node 'odd' is of the unknown kind 'paste'; known: copy",
        "  node 'orphan' needs 'gone', which is no node",
        "  nodes need one another in a circle: x -> y -> z -> x",
    ]


def test_a_node_that_needs_itself_is_a_circle() -> None:
    assert dag_problems([Node("a", "k", needs=("a",))], kinds={"k"}) == ("nodes need one another in a circle: a -> a",)


def test_needs_of_earlier_runs_are_known() -> None:
    assert dag_problems([Node("b", "k", needs=("a", "a"))], kinds={"k"}, known={"a"}) == ()


def test_a_long_chain_needs_no_recursion() -> None:
    nodes = [Node(str(index), "k", needs=(str(index - 1),) if index else ()) for index in range(5000)]
    assert dag_problems(nodes, kinds={"k"}) == ()


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="cost_bytes=-1"):
        Node("a", "k", cost_bytes=-1)


def test_ready_nodes_start_by_priority_then_cost_then_id() -> None:
    frontier = Frontier()
    frontier.add(
        [Node("d", "k", priority=1, cost_bytes=9), Node("c", "k"), Node("b", "k"), Node("a", "k", cost_bytes=5)]
    )
    assert _start_all(frontier) == ["a", "b", "c", "d"]


@given(st.integers(0, 1000))
def test_the_order_given_does_not_matter(seed: int) -> None:
    nodes = [Node(f"{index:02}", "k", cost_bytes=index % 3) for index in range(12)]
    nodes += [Node(f"after-{index}", "k", needs=("03", f"{index:02}")) for index in range(5)]
    frontier, shuffled = Frontier(), Frontier()
    frontier.add(nodes)
    shuffled.add(random.Random(seed).sample(nodes, len(nodes)))
    assert _start_all(frontier) == _start_all(shuffled)


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=30))
def test_every_node_starts_once_and_after_its_needs(needs_of: list[list[int]]) -> None:
    nodes = [
        Node(str(index), "k", needs=tuple(str(need) for need in needs if need < index))
        for index, needs in enumerate(needs_of)
    ]
    frontier = Frontier()
    frontier.add(nodes)
    order = _start_all(frontier)
    assert sorted(order) == sorted(node.id for node in nodes)
    assert all(order.index(need) < order.index(node.id) for node in nodes for need in node.needs)
    assert frontier.num_pending == 0


def test_a_lost_payload_runs_again_with_its_own_lost_needs_before_the_node_that_needs_it() -> None:
    frontier = Frontier()
    frontier.add([Node("a", "k"), Node("b", "k", needs=("a",)), Node("unneeded", "k")])
    _start_all(frontier)
    frontier.lose(["a", "b", "unneeded"])
    assert frontier.num_pending == 0
    frontier.add([Node("c", "k", needs=("b",))])
    assert _start_all(frontier) == ["a", "b", "c"]


def test_a_payload_lost_while_its_dependent_is_ready_is_noticed() -> None:
    frontier = Frontier()
    frontier.add([Node("a", "k"), Node("b", "k", needs=("a",))])
    assert frontier.pop() == Node("a", "k")
    frontier.complete("a")
    frontier.lose(["a"])
    assert _start_all(frontier) == ["a", "b"]


def test_a_node_taken_again_waits_for_needs_lost_meanwhile() -> None:
    frontier = Frontier()
    frontier.add([Node("a", "k"), Node("b", "k", needs=("a",))])
    frontier.pop()
    frontier.complete("a")
    frontier.pop()
    frontier.lose(["a"])
    frontier.again("b")
    assert _start_all(frontier) == ["a", "b"]


def test_forgetting_keeps_nodes_that_once_finished() -> None:
    frontier = Frontier()
    frontier.add([Node("a", "k"), Node("b", "k", needs=("a",))])
    frontier.pop()
    frontier.complete("a")
    frontier.lose(["a"])
    frontier.peek()
    frontier.forget_pending()
    assert set(frontier.known) == {"a"}
    assert frontier.peek() is None


def _start_all(frontier: Frontier) -> list[str]:
    order = []
    while (node := frontier.pop()) is not None:
        order.append(node.id)
        frontier.complete(node.id)
    return order
