"""The evaluation of passages against plain loops."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlights_paper.experiments.language.evaluation import (
    AskedPositions,
    Estimate,
    Evaluation,
    JudgedMethod,
    by_chance,
    common_suffix,
    judge,
    longest_suffixes,
    vote,
)


def suffix_length(text: list[int], position: int, context: list[int]) -> int:
    length = 0
    while length < len(context) and position >= length and text[position - length] == context[-1 - length]:
        length += 1
    return length


texts = st.lists(st.integers(0, 2), min_size=12, max_size=60)


@given(texts, st.integers(1, 6), st.integers(0, 1000))
def test_common_suffixes_are_those_of_a_plain_loop(text: list[int], length: int, seed: int):
    draw = random.Random(seed)
    contexts = [[draw.randrange(3) for _ in range(length)] for _ in range(4)]
    positions = [[draw.randrange(len(text)) for _ in range(5)] for _ in contexts]
    found = common_suffix(torch.tensor(positions), torch.tensor(contexts), torch.tensor(text))
    expected = [[suffix_length(text, p, c) for p in row] for row, c in zip(positions, contexts, strict=True)]
    assert found.tolist() == expected


@settings(deadline=None)
@given(texts, st.integers(1, 6), st.integers(1, 8), st.integers(0, 1000))
def test_no_position_has_a_longer_common_suffix_than_those_that_are_found(
    text: list[int], length: int, k: int, seed: int
):
    draw = random.Random(seed)
    contexts = [[draw.randrange(4) for _ in range(length)] for _ in range(3)]  # 3 is in no text
    found = longest_suffixes(torch.tensor(contexts), torch.tensor(text), k=k, seed=seed)
    for row, context in zip(found.tolist(), contexts, strict=True):
        lengths = sorted((suffix_length(text, p, context) for p in range(len(text) - 1)), reverse=True)
        assert len(set(row)) == k
        assert [suffix_length(text, p, context) for p in row] == lengths[:k]


def test_chance_never_takes_the_last_token_which_has_no_next_one():
    assert set(by_chance(100, torch.arange(3), k=5, seed=0).flatten().tolist()) == {0, 1}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_first_of_the_most_frequent_tokens_wins_the_vote(tokens: list[int]):
    most = max(Counter(tokens).values())
    expected = next(token for token in tokens if tokens.count(token) == most)
    assert vote(torch.tensor([tokens])).tolist() == [expected]


def test_judgements_are_those_of_a_plain_loop():
    draw = random.Random(3)
    text = [draw.randrange(3) for _ in range(80)]
    contexts = [[draw.randrange(3) for _ in range(6)] for _ in range(30)]
    after, said = ([draw.randrange(3) for _ in contexts] for _ in range(2))
    positions = [[draw.randrange(79) for _ in range(7)] for _ in contexts]
    asked = AskedPositions(torch.tensor(contexts), torch.tensor(after), torch.tensor(said))
    found = judge(torch.tensor(positions), asked, torch.tensor(text), end=2)
    for row, context in enumerate(contexts):
        lengths = [suffix_length(text, p, context) for p in positions[row]]
        following = [text[p + 1] for p in positions[row]]
        winner = max(following, key=lambda token: (following.count(token), -following.index(token)))
        assert found["suffix"][row] == pytest.approx(sum(lengths) / 7)
        assert found["same_end"][row] == pytest.approx(sum(length >= 2 for length in lengths) / 7)
        assert found["next_true"][row] == (winner == after[row])
        assert found["next_said"][row] == (winner == said[row])


def test_the_error_of_an_estimate_is_that_of_a_mean():
    values = np.array([1.0, 2.0, 4.0, 9.0])
    found = Estimate.of(values)
    assert found.mean == 4.0
    assert found.error == pytest.approx((sum((v - 4) ** 2 for v in values) / 3 / 4) ** 0.5)


def test_the_verdict_says_more_only_beyond_two_standard_errors():
    names = ("suffix", "same_end", "next_true", "next_said")
    gains = dict(
        zip(names, (Estimate(0.1, 0.2), Estimate(-0.3, 0.1), Estimate(0.5, 0.2), Estimate(0.0, 0.1)), strict=True)
    )
    same = {name: Estimate(0.5, 0.1) for name in names}
    found = Evaluation(10, 20, 30, "word", Estimate(0.3, 0.1), [JudgedMethod("untrained", "dot", same, gains)])
    assert found.verdict("dot") == (
        "Training added, by kernel dot: more of vote is the next token; less of same end; "
        "not measurably another common suffix, vote is what the network says."
    )
