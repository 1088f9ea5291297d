"""The memory: a directory that holds one training run in dual form.

`writer` is the only one that writes it, `reader` maps it, `blocks` reads its slots, `selection` masks them; the bytes
are described in docs/memory_format.md.
"""
