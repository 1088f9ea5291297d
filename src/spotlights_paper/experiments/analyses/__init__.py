"""What is asked of a recorded run: one question per file, on the public names, numbers out."""
