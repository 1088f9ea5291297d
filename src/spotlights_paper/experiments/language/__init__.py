"""What the language experiments share: texts, the network, training, passages and their evaluation."""
