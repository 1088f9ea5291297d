"""The analyses of a recorded run: one question per file, on the public names, with numbers as results."""
