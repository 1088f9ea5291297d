# # Why this prediction?
#
# A linear layer that was trained by gradient descent equals its initial weights plus
# one term for each visit of each training example. So what the layer answers is a sum,
# too: a part of the initial weights, and one *contribution* for every visit. This page
# records a small network, takes one logit apart, and checks that the parts add up.

from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import spotlights as sl

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data).float() / 16
labels = torch.tensor(digits.target)
train, test = torch.arange(1500), torch.arange(1500, len(images))

# ## Record the training
#
# The layers have names here, `hidden` and `output`. With a plain `nn.Sequential(…)`
# they would be `"0"` and `"2"`. A module of your own has the names of its attributes,
# as in `model.named_modules()`.

layers = OrderedDict(
    hidden=nn.Linear(64, 100), relu=nn.ReLU(), output=nn.Linear(100, 10)
)
model = nn.Sequential(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

with sl.record(model, optimizer, "digits.memory") as recorder:
    for step in range(500):
        batch = train[torch.randint(len(train), (32,))]
        recorder.batch(example=batch, label=labels[batch])
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

memory = sl.open("digits.memory")
print(memory.verify(model))

# `verify` adds up everything that was recorded and compares the sum with the trained
# weights. They agree to the rounding of float32.
#
# ## One answer
#
# Here is a test image, and what the network says.

query = images[test[:1]]
logits = model(query)[0].detach()
answer = int(logits.argmax())
for line in query.reshape(8, 8):
    print("".join(" .:+#"[min(int(pixel * 5), 4)] * 2 for pixel in line))
print(f"the network says {answer}, with a logit of {logits[answer]:.4f}")

# `memory.attend` runs the network once and keeps what every layer saw.
# `contributions(target=…)` are the parts of one logit. In the last layer they are
# exact: with the part of the initial weights they add up to the logit.

attention = memory.attend(model, query)
contributions = attention["output"].contributions(target=answer)
initial, total = contributions.initial.item(), contributions.total().item()
print(
    f"initial weights {initial:.4f} + contributions {total:.4f} = {initial + total:.4f}"
)

# By class: which classes speak for the answer, and which against it? `slots` is the
# number of visits that were added up.

print(contributions.totals("label"))

# By example: the training images that add most to this logit, and those that subtract
# most from it.

print(contributions.top(5, by="example"))
print(contributions.bottom(5, by="example"))

# And in time: the sums over five stretches of training. The early steps do most of the
# work.

print(contributions.totals("step", bins=5))

# ## Without some of the examples
#
# What would the layers compute without the visits of one class? `without` makes a view
# of the memory that leaves them out, and `primal` puts the weights of that view into a
# copy of the network. This is called a *mask*. It is arithmetic on this network, not a
# forecast of what retraining would give.

masked = memory.without(label=answer).primal(model)
print(f"with everything: {answer}")
print(f"without the visits of class {answer}: {int(masked(query).argmax())}")

# ## If the network had been trained without them
#
# That is another question. Its answer is an estimate, called *influence*. Positive
# numbers mean: without this example, the logit would be smaller. Ranks and signs count;
# the size has no unit.

influence = attention.influence(target=answer)
print(influence.top(5, by="example"))

# ## Next steps
#
# - [How truthful the answers are](../truth.md): contributions, masks and influence
#   against networks that were really trained again.
# - [The glossary](../glossary.md) has all words of this page.
# - To look at answers in a browser, describe your network once, as an `sl.Subject`: the
#   memory, the model, the test inputs and how an example looks. `subject.explore()`
#   opens the [explorer](../explorer.md), and every command takes the same description:
#   `spotlights top digits.memory 17 --subject train.py:subject`.
