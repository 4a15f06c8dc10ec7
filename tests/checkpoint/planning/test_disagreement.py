"""Which of several holders is outvoted."""

from __future__ import annotations

from torchtitan_lite.checkpoint.planning.rank_comparison import Holdings, disagreements


def held(host: str, **digests: int) -> Holdings:
    return host, {(0, at): (name, digest) for at, (name, digest) in enumerate(digests.items())}


def disagreement(per_rank: list[Holdings]) -> str:
    (text,) = {text for _, text in disagreements(per_rank, in_words=True)}
    return text


def test_of_three_holders_the_one_that_is_outvoted_is_named_with_its_host() -> None:
    found = disagreement([held("a", w=1, b=5), held("b", w=2, b=5), held("c", w=1, b=5)])
    assert found == "rank 1 on b holds another w than 2 other ranks"


def test_of_two_holders_both_are_named() -> None:
    assert disagreement([held("a", w=1), held("b", w=2)]) == (
        "rank 0 on a, rank 1 on b hold different values of w, and none has the majority"
    )


def test_two_against_two_are_all_named() -> None:
    found = disagreement([held(host, w=digest) for host, digest in zip("abcd", (1, 2, 1, 2), strict=True)])
    assert found.startswith("rank 0 on a, rank 1 on b, rank 2 on c, rank 3 on d hold different values of w")


def test_many_tensors_are_counted_and_ranks_of_other_groups_are_left_alone() -> None:
    odd = {f"t{number}": number for number in range(6)}
    even = dict.fromkeys(odd, -1)
    others = ("z", {(1, 0): ("t0", 77)})
    assert disagreement([held("a", **odd), held("b", **odd), held("c", **even), others]) == (
        "rank 2 on c holds another t0, t1, t2 and 3 other tensors than 2 other ranks"
    )


def test_what_is_equal_is_no_disagreement() -> None:
    assert disagreement([held("a", w=1), held("b", w=1)]) == ""


def test_each_rank_learns_which_of_its_own_differ() -> None:
    found = disagreements([held("a", w=1, b=5), held("b", w=2, b=5), ("c", {(1, 0): ("w", 3)})], in_words=False)
    assert found == [([(0, 0)], ""), ([(0, 0)], ""), ([], "")]
