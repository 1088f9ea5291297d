"""Project Gutenberg's books: copies differ in line endings and in what is printed around the book."""

_FIRST = "\nTHE WOLF AND THE LAMB\n"
"""The heading of the first fable."""
_LAST = "\nANNOUNCEMENTS\n"
"""The heading below the last fable: the publisher's list of other books."""


def fables(copy: bytes) -> bytes:
    """Æsop's fables out of a copy of the book: from the first heading to the end of the last one, with plain line ends.

    A copy without these headings is returned as it is, for the checksum to refuse it.
    """
    text = copy.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    start = text.find(_FIRST)
    end = text.find(_LAST, start)
    if start < 0 or end < 0:
        return copy
    return (text[start:end].strip("\n") + "\n").encode()
