"""What is kept of prompts is found by its tokens, and what was used last stays."""

import random

import pytest

from umad.serve.kinds.prefixes import Prefixes


def made(tokens: list[int], size: int = 2):
    """What is kept of a block is all that led there."""
    return lambda at: tuple(tokens[: at + size])


def add(kept: Prefixes[tuple[int, ...]], tokens: list[int], most: int = 9) -> None:
    kept.add(tokens, most, made(tokens))


def test_the_longest_beginning_is_found_in_whole_blocks() -> None:
    kept: Prefixes[tuple[int, ...]] = Prefixes(2)
    assert kept.find([1, 2]) == []
    add(kept, [1, 2, 3, 4, 5])
    assert len(kept) == 2
    assert kept.find([1, 2, 3, 4, 9, 9]) == [(1, 2), (1, 2, 3, 4)]
    assert kept.find([1, 2, 3]) == [(1, 2)]
    assert kept.find([3, 4]) == [], "the same tokens at another place are others"
    assert kept.find([]) == []


def test_what_prompts_begin_with_is_there_once() -> None:
    kept: Prefixes[tuple[int, ...]] = Prefixes(2)
    add(kept, [1, 2, 3, 4])
    add(kept, [1, 2, 5, 6])
    asked: list[int] = []
    kept.add([1, 2, 5, 6, 7, 8], 9, lambda at: asked.append(at) or ())
    assert asked == [4]
    assert len(kept) == 4


def test_the_least_recently_used_goes_and_never_one_before_another() -> None:
    kept: Prefixes[tuple[int, ...]] = Prefixes(2)
    add(kept, [1, 2, 3, 4])
    add(kept, [5, 6, 7, 8])
    kept.find([1, 2, 3, 4])
    kept.shrink(3)
    assert (len(kept.find([5, 6, 7, 8])), len(kept.find([1, 2, 3, 4]))) == (1, 2)
    add(kept, [1, 2, 3, 4, 9, 9], most=3)
    assert (len(kept.find([5, 6])), len(kept.find([1, 2, 3, 4, 9, 9]))) == (0, 3)
    kept.shrink(0)
    assert len(kept) == 0
    assert kept.find([1, 2]) == []


def test_a_prompt_that_is_longer_than_all_is_kept_from_its_beginning() -> None:
    kept: Prefixes[tuple[int, ...]] = Prefixes(2)
    add(kept, [9, 9])
    add(kept, list(range(20)), most=3)
    assert kept.find(list(range(20)))[-1] == tuple(range(6))
    assert len(kept) == 3
    add(kept, [7, 7], most=0)
    assert len(kept) == 0


def test_one_that_cannot_be_made_leaves_all_as_it_was() -> None:
    kept: Prefixes[tuple[int, ...]] = Prefixes(2)
    add(kept, [1, 2])

    def refused(at: int) -> tuple[int, ...]:
        if at == 4:
            raise MemoryError
        return (at,)

    with pytest.raises(MemoryError):
        kept.add([1, 2, 3, 4, 5, 6], 9, refused)
    assert kept.find([1, 2, 3, 4, 5, 6]) == [(1, 2), (2,)]
    kept.shrink(1)
    assert kept.find([1, 2, 3, 4]) == [(1, 2)]


def test_at_any_time_it_is_what_a_plain_list_would_hold() -> None:
    chance = random.Random(5)
    kept: Prefixes[tuple[int, ...]] = Prefixes(2)
    for _ in range(2000):
        tokens = [chance.randint(0, 2) for _ in range(chance.randint(0, 9))]
        most = chance.randint(0, 12)
        match chance.randint(0, 4):
            case 0:
                kept.shrink(most)
                assert len(kept) <= most
            case 1:
                found = kept.find(tokens)
                assert found == [tuple(tokens[: 2 * at + 2]) for at in range(len(found))]
            case _:
                before = len(kept.find(tokens))
                add(kept, tokens, most)
                whole = len(tokens) // 2
                assert len(kept) <= most
                # As much of it as there is room for, and no less than before.
                assert len(kept.find(tokens)) == min(whole, max(before, most), most)
