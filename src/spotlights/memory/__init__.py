"""The memory: one training run in dual form, as files in a store.

`format` says what the bytes mean, `store` where they are. `writer` appends steps, `reader` maps the files, `blocks`
gives a layer's slots, `selection` chooses among them. docs/memory_format.md describes the bytes.
"""
