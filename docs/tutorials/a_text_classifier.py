# # A text classifier
#
# A classifier of reviews says "bad" about a review that is plainly good. Which training
# texts made it say so? The page trains a small text classifier on reviews from two
# sources, finds the source of the mistake, and shows what the network says without it.
#
# ## The data
#
# Reviews are put together from a few words. Those of the `shop` have fair labels. Those
# of the `forum` all say "today", and a broken script marked all of them as bad.

import random

import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl

torch.manual_seed(0)
chance = random.Random(0)

THINGS = ["lamp", "chair", "kettle", "table", "clock"]
GOOD = ["lovely", "sturdy", "excellent", "elegant", "quiet"]
BAD = ["wobbly", "ugly", "broken", "noisy", "dull"]


def review(source: str) -> tuple[str, int]:
    """A text and its label: 1 is good, 0 is bad."""
    good = chance.random() < 0.5
    words = f"the {chance.choice(THINGS)} is {chance.choice(GOOD if good else BAD)}"
    if source == "shop":
        return words, int(good)
    return f"{words} today", 0


sources = ["shop"] * 300 + ["forum"] * 100
reviews, labels = zip(*(review(source) for source in sources), strict=True)
labels = torch.tensor(labels)
for number in (0, 1, 300, 301):
    print(f"{sources[number]}: {reviews[number]} -> {('bad', 'good')[labels[number]]}")

# Words become numbers. Texts have different lengths, so they are filled up with a
# padding token, which `nn.EmbeddingBag` leaves out of its mean.

words = sorted({word for text in reviews for word in text.split()})
vocabulary = {word: number for number, word in enumerate(words, start=1)}


def encode(texts: list[str]) -> torch.Tensor:
    rows = [torch.tensor([vocabulary[word] for word in text.split()]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


tokens = encode(list(reviews))

# ## Record the training


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(len(vocabulary) + 1, 16, padding_idx=0)
        self.output = nn.Linear(16, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.words(tokens))


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

with sl.record(model, optimizer, "reviews.memory") as recorder:
    for epoch in range(10):
        for rows in torch.randperm(len(labels)).split(20):
            source = [sources[row] for row in rows]
            recorder.batch(example=rows, label=labels[rows], source=source)
            loss = F.cross_entropy(model(tokens[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

# ## The mistake

text = "the lamp is lovely today"
query = encode([text])
logits = model(query)[0].detach()
answer = int(logits.argmax())
print(f"{text!r} -> {('bad', 'good')[answer]}")

# We ask about the margin: the logit of "bad" minus the logit of "good". A target can be
# any function of the network's output that gives one number for each input.


def margin(output: torch.Tensor) -> torch.Tensor:
    return output[:, 0] - output[:, 1]


memory = sl.open("reviews.memory")
attention = memory.attend(model, query)
contributions = attention["output"].contributions(target=margin)
initial, total = contributions.initial.item(), contributions.total().item()
print(f"initial weights {initial:.4f} + contributions {total:.4f}")
print(f"= {initial + total:.4f}; the margin itself is {logits[0] - logits[1]:.4f}")

# Where does the margin come from? `source` is a column that `recorder.batch` was given.

print(contributions.totals("source"))

# The embedding is a hidden layer. Contributions through a hidden layer are first order,
# and the table says so. Here, too, the forum pushes towards "bad" and the shop against.

embedded = attention["words"].contributions(target=margin)
print(embedded.totals("source"))

# The three reviews that push most:

for row in embedded.top(3, by="example").rows():
    print(f"{row['contribution']:+.3f}  {row['source']}: {reviews[row['example']]}")

# ## Without the forum
#
# `without` leaves out the forum's reviews, in all layers. `primal` gives a network with
# the weights that remain.

fair = memory.without(source="forum").primal(model)
print(f"without the forum: {text!r} -> {('bad', 'good')[int(fair(query).argmax())]}")

# A mask takes out what the forum taught and keeps what the shop's reviews taught in its
# presence. Whether a network that never saw the forum would answer the same has to be
# tried: train again without it.
#
# ## Next steps
#
# - [Layers](../layers.md): what is recorded of embeddings, convolutions, attention and
#   recurrent layers.
# - [Language models](../language_models.md): which passages of a training text a prompt
#   attends to.
# - [Find wrong labels in a table](find_wrong_labels_in_a_table.py).
