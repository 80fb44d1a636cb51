from __future__ import annotations

import pytest
from lmcache_core.documented.radix_tree import RadixTree
from lmcache_core.errors import IntegrityError


def blocks(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


@pytest.fixture
def tree():
    return RadixTree(100)


def insert(tree, text):
    tree.insert(blocks(text), [text[: i + 1] for i in range(len(text))])
    tree.check_integrity()


def find(tree, text):
    values = tree.find(blocks(text))
    tree.check_integrity()
    return values


def test_a_sequence_is_one_run_until_another_parts_from_it(tree):
    insert(tree, "abcde")
    assert (tree.num_nodes, tree.num_blocks) == (1, 5)
    insert(tree, "abcxy")
    assert (tree.num_nodes, tree.num_blocks) == (3, 7)
    assert find(tree, "abcxz") == ["a", "ab", "abc", "abcx"]
    assert find(tree, "b") == find(tree, "") == []


def test_a_sequence_that_parts_within_a_run_does_not_reach_what_is_behind_the_run(tree):
    insert(tree, "abcd")
    insert(tree, "abxy")
    for text in ("ac", "acd", "ax", "axy"):
        assert (tree.prefix_length(blocks(text)), find(tree, text)) == (1, ["a"])


def test_a_conversation_that_grows_stays_one_run(tree):
    for turn in range(1, 20):
        insert(tree, "abcdefghijklmnopqrst"[:turn])
    assert (tree.num_nodes, tree.num_blocks) == (1, 19)


def test_a_shorter_use_cuts_a_run_and_a_longer_one_joins_it_again(tree):
    insert(tree, "abcde")
    find(tree, "abc")
    find(tree, "a")
    assert tree.num_nodes == 3
    assert find(tree, "abcde") == ["a", "ab", "abc", "abcd", "abcde"]
    assert tree.num_nodes == 1


def test_measuring_is_no_use():
    tree = RadixTree(4)
    insert(tree, "ab")
    insert(tree, "cd")
    assert tree.prefix_length(blocks("abx")) == 2
    insert(tree, "e")
    assert (tree.prefix_length(blocks("ab")), tree.prefix_length(blocks("cd"))) == (1, 2)


def test_the_leaf_used_longest_ago_goes_first_and_from_its_end():
    tree = RadixTree(6)
    insert(tree, "abc")
    insert(tree, "axy")
    find(tree, "abc")
    insert(tree, "kl")
    assert [tree.prefix_length(blocks(text)) for text in ("abc", "axy", "kl")] == [3, 2, 2]
    insert(tree, "mno")
    assert [tree.prefix_length(blocks(text)) for text in ("abc", "axy", "kl", "mno")] == [
        1,
        1,
        2,
        3,
    ]


def test_what_is_left_of_a_fork_becomes_one_run_again():
    tree = RadixTree(5)
    insert(tree, "abx")
    insert(tree, "abcd")
    assert (tree.num_nodes, tree.num_blocks) == (3, 5)
    insert(tree, "abcde")
    assert (tree.num_nodes, tree.num_blocks, tree.prefix_length(blocks("abx"))) == (1, 5, 2)


def test_the_order_of_eviction_is_the_order_of_use_over_many_leaves():
    tree = RadixTree(26)
    letters = "abcdefghijklmnopqrstuvwxyz"
    for letter in letters:
        insert(tree, letter)
    for letter in letters[:10]:
        find(tree, letter)
    for i in range(16):
        insert(tree, f"#{'-' * i}"[: i + 1])
        gone = [letter for letter in letters if not tree.prefix_length(blocks(letter))]
        assert gone == list(letters[10 : 11 + i])


def test_values_and_blocks_must_be_as_many(tree):
    with pytest.raises(ValueError, match="3 values for 2 blocks"):
        tree.insert(blocks("ab"), ["a", "ab", "abc"])
    assert tree.num_blocks == 0


def test_a_tree_without_room_is_refused():
    with pytest.raises(ValueError, match="max_blocks=0"):
        RadixTree(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, run: run.blocks.pop(),
        lambda tree, run: run.values.pop(),
        lambda tree, run: (run.blocks.pop(), run.values.pop()),
        lambda tree, run: (run.blocks.clear(), run.values.clear()),
        lambda tree, run: run.blocks.__setitem__(0, b"z"),
        lambda tree, run: setattr(run, "parent", tree._root),
        lambda tree, run: setattr(run, "last_use", 99),
        lambda tree, run: tree._by_use.pop(run),
        lambda tree, run: tree._by_use.move_to_end(run),
        lambda tree, run: run.parent.children.pop(b"x"),
        lambda tree, run: setattr(tree, "max_blocks", 3),
    ],
    ids=range(11),
)
def test_damage_is_found(tree, damage):
    insert(tree, "abcd")
    insert(tree, "abxy")
    run = tree._root.children[b"a"].children[b"c"]
    damage(tree, run)
    with pytest.raises(IntegrityError):
        tree.check_integrity()
