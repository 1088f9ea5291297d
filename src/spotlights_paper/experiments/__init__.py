"""One experiment per file: settings on top, straight-line below."""
