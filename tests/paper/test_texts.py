"""Claims about texts: where they are cut, and how they become tokens."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spotlights as sl
from spotlights_paper import datasets
from spotlights_paper.datasets import Vocabulary, read_text
from spotlights_paper.datasets.catalogue import fables
from spotlights_paper.datasets.texts import UNKNOWN, split_text

BOOK = "Æsop\n\nTHE WOLF AND THE LAMB\n\n\nONE day a Wolf.\n\n\nANNOUNCEMENTS\n\n\nOther books.\n"


def need(name: str):
    try:
        return datasets.load_text(name)
    except datasets.DatasetError as error:
        pytest.skip(str(error))


def test_copies_of_the_fables_with_other_surroundings_have_the_same_body():
    body = "THE WOLF AND THE LAMB\n\n\nONE day a Wolf.\n"
    copies = [BOOK, "\ufeffAnother header\n" + BOOK, BOOK.replace("\n", "\r\n"), BOOK + "and a licence", body]
    assert {fables(copy.encode()).decode() for copy in copies} == {body}


def test_the_papers_queries_fall_into_the_test_text_of_the_fables():
    aesop = need("aesop")
    assert len(aesop.test) == 16_667
    assert len(aesop.train) == 121_023
    spoken = aesop.test.tokens.replace("\n", " ")
    assert "glad to take himself off as fast as" in spoken
    assert "the Lamb a little d" in spoken
    assert "he can do no more. At " in aesop.train.tokens.replace("\n", " ")
    assert "".join(aesop.vocabulary.decode(aesop.train.numbers[:21])) == "THE WOLF AND THE LAMB"


def test_wikitext_has_the_known_numbers_of_words():
    wikitext = need("wikitext-2")
    assert (len(wikitext.train), len(wikitext.test), len(wikitext.vocabulary)) == (2_088_628, 245_569, 33_278)
    assert wikitext.vocabulary.tokens[:3] == ("the", ",", ".")
    assert list(datasets.load_text("wikitext-2").test.tokens[:5]) == ["<eos>", "=", "Robert", "<unk>", "="]


def test_a_text_of_ones_own_is_cut_at_its_end(tmp_path: Path):
    book = tmp_path / "book.txt"
    book.write_text("A hen sat. It’s late.\n\nThe hen sat on. " * 5, encoding="utf-8")
    characters = read_text(book, "character")
    assert characters.name == "book"
    assert characters.train.tokens + characters.test.tokens == book.read_text()
    words = read_text(book, "word")
    assert list(words.test.tokens)[-5:] == ["hen", "sat", "on", ".", "<eos>"]
    assert len(words.test) == (len(words.train) + len(words.test)) // 10
    assert "<eos>" in words.vocabulary.tokens


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"too short", "too few to train on"), (b"\xff\xfe\x00" * 30, "not text in UTF-8"), (None, "cannot be read")],
)
def test_a_file_that_is_no_text_is_refused_in_a_sentence(tmp_path: Path, content: bytes | None, said: str):
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(datasets.DatasetError, match=said):
        read_text(tmp_path / "x.txt", "character")


def test_unknown_units_are_refused():
    with pytest.raises(sl.SettingError, match="character, word"):
        split_text("a b", "syllable")


@given(st.text(min_size=1, max_size=60))
def test_characters_that_are_known_survive_the_way_there_and_back(text: str):
    vocabulary = Vocabulary.of(text, "character")
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert set(vocabulary.tokens) == {*text, UNKNOWN["character"]}


@given(st.lists(st.sampled_from(["the", "hen", "sat", "once"]), min_size=1, max_size=30))
def test_words_are_numbered_by_frequency_and_rare_ones_are_unknown(words: list[str]):
    vocabulary = Vocabulary.of(words, "word")
    counts = [words.count(word) for word in vocabulary.tokens if word != "<unk>"]
    assert counts == sorted(counts, reverse=True)
    assert all(count > 1 for count in counts)
    expected = [word if words.count(word) > 1 else "<unk>" for word in words]
    assert vocabulary.decode(vocabulary.encode(words)) == expected


def test_a_typed_prompt_is_split_as_the_text_is():
    vocabulary = Vocabulary("word", ("U.S.", "it", "'s", ",", "@-@", "<unk>"))
    assert vocabulary.split("U.S., it's <unk>") == ["U", ".", "S", ".", ",", "it", "'s", "<unk>"]
    assert vocabulary.split("U.S. it") == ["U.S.", "it"]
    assert Vocabulary("character", ("a",)).split("a b") == "a b"
