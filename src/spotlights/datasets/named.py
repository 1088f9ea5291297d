"""`load`: every data set by its name."""

from __future__ import annotations

from typing import Literal, overload

from spotlights.datasets import digits
from spotlights.datasets.catalogue import CATALOGUE, TEXTS
from spotlights.datasets.images import Dataset, Split, SplitName, load_images
from spotlights.datasets.texts import TextDataset, TextSplit, load_text
from spotlights.errors import SettingError, UnknownNameError

TextName = Literal["aesop", "wikitext-2"]


@overload
def load(name: TextName, split: None = None) -> TextDataset: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def load(name: TextName, split: SplitName) -> TextSplit: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def load(name: str, split: None = None) -> Dataset: ...
@overload
def load(name: str, split: SplitName) -> Split: ...
def load(name: str, split: str | None = None) -> Dataset | Split | TextDataset | TextSplit:
    """Loads a data set, all of it or one split: "train" or "test".

    Images: "mnist", "fashion-mnist" and "digits" (scikit-learn's 8 × 8 digits, which need no source but scikit-learn
    itself). Texts: "aesop" (Æsop's Fables by Stickney, in characters) and "wikitext-2" (in words). A text file of
    your own: `read_text`.
    """
    known = (*CATALOGUE, digits.NAME, *TEXTS)
    if name not in known:
        raise UnknownNameError(f'No data set "{name}". There are: {", ".join(known)}.')
    if split not in (None, "train", "test"):
        raise SettingError(f'No split "{split}". There are: train, test.')
    if name not in TEXTS:
        return load_images(name, split)
    text = load_text(name)
    return text if split is None else getattr(text, split)
