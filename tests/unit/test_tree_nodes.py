"""Nodes of trees: what they declare is all that comparing, walking and showing them needs."""

from __future__ import annotations

import typing

import pytest

from dprobes.bpftrace import script_tree
from dprobes.dpc.syntax import syntax_tree
from dprobes.dpc.typedtree import typed_program, typed_values
from dprobes.tree_nodes import Node

UNIONS = (
    syntax_tree.Expression, syntax_tree.Statement, typed_values.Argument, typed_program.Statement,
    script_tree.Expression, script_tree.Statement,
)  # fmt: skip


class Leaf(Node):
    """A number."""

    value: int


class Branch(Node):
    """Several nodes, and what is none."""

    name: str
    first: Leaf | None = None
    others: tuple[Leaf | Branch, ...] = ()


def test_nodes_are_frozen_and_equal_by_their_fields() -> None:
    assert Branch("a", Leaf(1)) == Branch("a", Leaf(1))
    assert Branch("a", Leaf(1)) != Branch("a", Leaf(2))
    assert hash(Leaf(1)) == hash(Leaf(1))
    assert repr(Branch("a", Leaf(1))) == "Branch(name='a', first=Leaf(value=1), others=())"
    with pytest.raises(AttributeError, match="cannot assign to 'value': a node is immutable"):
        Leaf(1).value = 2  # type: ignore[misc]


class Other(Node):
    """A node with the fields of a leaf."""

    value: int


def test_nodes_of_different_kinds_are_different() -> None:
    assert Leaf(1) != Other(1)


def test_a_constructor_accepts_just_the_declared_fields() -> None:
    assert Branch("a", others=(Leaf(1),)) == Branch(name="a", first=None, others=(Leaf(1),))
    with pytest.raises(TypeError, match=r"Branch\(\) needs name"):
        Branch()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Leaf\(\) has too many arguments"):
        Leaf(1, 2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Leaf\(\) has too many arguments"):
        Leaf(1, value=2)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"Leaf\(\) has no other"):
        Leaf(1, other=2)  # type: ignore[call-arg]


def test_a_node_is_replaced_by_one_with_other_values() -> None:
    node = Branch("a", Leaf(1))
    assert node.replaced(name="b") == Branch("b", Leaf(1))
    assert node == Branch("a", Leaf(1))


def test_children_are_the_nodes_in_the_fields_in_their_order() -> None:
    assert list(Branch("a", Leaf(1), (Leaf(2), Leaf(3))).children()) == [Leaf(1), Leaf(2), Leaf(3)]
    assert not list(Branch("a").children())


def test_a_walk_has_each_node_before_those_in_it() -> None:
    inner = Branch("b", Leaf(2))
    tree = Branch("a", Leaf(1), (inner, Leaf(3)))
    assert list(tree.walk()) == [tree, Leaf(1), inner, Leaf(2), Leaf(3)]


def test_a_walk_is_not_limited_by_the_depth_of_the_tree() -> None:
    tree = Branch("end")
    for _ in range(5000):
        tree = Branch("a", None, (tree,))
    assert sum(1 for _ in tree.walk()) == 5001


@pytest.mark.parametrize("union", UNIONS)
def test_all_of_a_tree_are_nodes(union: object) -> None:
    members = typing.get_args(union)
    assert members
    for member in members:
        assert issubclass(member, Node)
        assert member.__match_args__ == tuple(member.__annotations__)
