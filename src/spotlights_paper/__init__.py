"""The paper's experiments, data sets and report, written against the public names of `spotlights`."""
