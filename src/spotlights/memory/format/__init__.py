"""What the bytes of a memory mean: manifest, columns, segments, storage types. Nothing here opens a file."""
