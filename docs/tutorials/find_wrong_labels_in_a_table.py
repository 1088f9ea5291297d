# # Find wrong labels in a table
#
# A network keeps disagreeing with a wrong label. Whenever a training example comes by,
# the gradient of the loss says how much the network would like to answer something
# else. A memory keeps these gradients for every visit of every example, so
# `memory.suspects` only has to add them up and sort.
#
# We take a table of 569 tumours with 30 measurements each, which comes with
# scikit-learn, and make 30 of its labels wrong. The task is to find them again.

from collections import OrderedDict

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F

import spotlights as sl

torch.manual_seed(0)
table = load_breast_cancer()
features = torch.tensor(table.data).float()
features = (features - features.mean(dim=0)) / features.std(dim=0)
labels = torch.tensor(table.target)

flipped = torch.randperm(len(labels))[:30]
labels[flipped] = 1 - labels[flipped]
print(f"{len(labels)} rows, {len(flipped)} of them with a wrong label")

# ## Record the training
#
# The network has one hidden layer. The training loop is the usual one, with two
# additions: it runs inside `sl.record`, and `recorder.batch` says which rows are in the
# batch. `example` is the row's number and stays the same in every epoch. Every other
# keyword becomes a column of the memory.

layers = OrderedDict(hidden=nn.Linear(30, 32), relu=nn.ReLU(), output=nn.Linear(32, 2))
model = nn.Sequential(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

with sl.record(model, optimizer, "tumours.memory") as recorder:
    for epoch in range(15):
        for rows in torch.randperm(len(labels)).split(32):
            recorder.batch(example=rows, label=labels[rows])
            loss = F.cross_entropy(model(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

# ## Ask for suspects
#
# `suspicion` is the norm of the gradient at the network's output, added up over the
# visits of a row. The column `network says` is the class that the network preferred.

memory = sl.open("tumours.memory")
suspects = memory.suspects(30)
print(suspects)

# How many of these are rows whose labels we changed?

wrong = set(flipped.tolist())
hits = [example in wrong for example in suspects.examples]
print(f"{sum(hits[:10])} of the first 10, and {sum(hits)} of the first 30")

# The ranking is a list to look at, not a verdict. The other rows on it are hard to
# classify, or rare. Give the list to somebody who knows the data:

suspects.to_csv("suspects.csv")

# ## Next steps
#
# - [Why this prediction?](why_this_prediction.py) takes an answer apart completely.
# - [How truthful the answers are](../truth.md#wrong-labels): how many wrong labels
#   `suspects` finds on MNIST and Fashion-MNIST.
# - On the command line: [`spotlights audit`](../cli.md#audit).
