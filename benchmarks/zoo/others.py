"""Tables, graphs, games, recommendations, and networks that are trained without labels."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import Setup, architecture, supervised

EXAMPLES = 64


@architecture("Table with batch norm")
def table() -> Setup:
    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Linear(inside, outside), nn.BatchNorm1d(outside), nn.ReLU(), nn.Dropout(0.1)]

    model = nn.Sequential(*block(20, 32), *block(32, 32), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    rows, labels = torch.randn(EXAMPLES, 20), torch.randint(2, (EXAMPLES,))
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: F.cross_entropy(model(rows[ids]), labels[ids])),
        torch.randn(1, 20),
        lambda output: output[:, 1],
        "8",
        lambda ids: {"example": ids, "label": labels[ids]},
        batch_size=16,
    )


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(1_000, 8, sparse=True), nn.Embedding(20_000, 8, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.users(users), self.items(items)], dim=1))


@architecture("Recommender, sparse")
def recommender() -> Setup:
    model = Recommender()
    embeddings = [*model.users.parameters(), *model.items.parameters()]
    sparse, dense = torch.optim.SparseAdam(embeddings, lr=1e-2), torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
    users, items = torch.randint(1_000, (EXAMPLES,)), torch.randint(20_000, (EXAMPLES,))
    ratings = torch.randn(EXAMPLES, 1)

    def step(ids: Tensor) -> None:
        sparse.zero_grad()
        dense.zero_grad()
        F.mse_loss(model(users[ids], items[ids]), ratings[ids]).backward()
        sparse.step()
        dense.step()

    return Setup(model, [sparse, dense], EXAMPLES, step, (users[:1], items[:1]), lambda output: output[:, 0], "mlp.2")


class TiedAutoencoder(nn.Module):
    """The decoder uses the transposed weight of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(24, 8)
        self.bias = nn.Parameter(torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sigmoid(self.encoder(x)), self.encoder.weight.t(), self.bias)


@architecture("Tied autoencoder")
def tied_autoencoder() -> Setup:
    model = TiedAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = torch.randn(EXAMPLES, 24)
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: F.mse_loss(model(rows[ids]), rows[ids])),
        torch.randn(1, 24),
        lambda output: output[:, 3],
        "encoder",
    )


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(24, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else mu
        return self.fc4(F.relu(self.fc3(z))), mu, logvar


@architecture("VAE")
def vae() -> Setup:
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = torch.rand(EXAMPLES, 24)

    def loss(ids: Tensor) -> Tensor:
        made, mu, logvar = model(rows[ids])
        divergence = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()
        return F.binary_cross_entropy_with_logits(made, rows[ids], reduction="sum") + divergence

    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, loss),
        torch.rand(1, 24),
        lambda output: output[0][:, 3],
        "fc4",
    )


@architecture("GAN")
def gan() -> Setup:
    """One module with both networks, each with an optimizer of its own, as in torch's tutorial."""
    model = nn.ModuleDict(
        {
            "generator": nn.Sequential(
                nn.ConvTranspose2d(8, 8, 4, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(True),
                nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
                nn.Tanh(),
            ),
            "discriminator": nn.Sequential(
                nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(8 * 16, 1)
            ),
        }
    )
    generator, discriminator = model["generator"], model["discriminator"]
    model.forward = lambda images: discriminator(images)  # type: ignore[method-assign]
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    images = torch.randn(EXAMPLES, 1, 8, 8)

    def step(ids: Tensor) -> None:
        real, fake = torch.ones(len(ids), 1), torch.zeros(len(ids), 1)
        made = generator(torch.randn(len(ids), 8, 1, 1))
        of_d.zero_grad()
        F.binary_cross_entropy_with_logits(discriminator(images[ids]), real).backward()
        F.binary_cross_entropy_with_logits(discriminator(made.detach()), fake).backward()
        of_d.step()
        of_g.zero_grad()
        F.binary_cross_entropy_with_logits(discriminator(made), real).backward()
        of_g.step()

    return Setup(model, [of_d, of_g], EXAMPLES, step, images[:1], lambda output: output[:, 0], "discriminator.3")


@architecture("DQN")
def dqn() -> Setup:
    """Replay memory, target network with soft updates, clipped values, Huber loss: torch's tutorial."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    target = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    states, following = torch.randn(EXAMPLES, 4), torch.randn(EXAMPLES, 4)
    actions, rewards = torch.randint(2, (EXAMPLES, 1)), torch.rand(EXAMPLES)

    def step(ids: Tensor) -> None:
        values = model(states[ids]).gather(1, actions[ids])
        with torch.no_grad():
            expected = rewards[ids] + 0.99 * target(following[ids]).max(1).values
        optimizer.zero_grad()
        F.smooth_l1_loss(values, expected[:, None]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.005)

    return Setup(model, optimizer, EXAMPLES, step, torch.randn(1, 4), lambda output: output[:, 1], "4", batch_size=16)


class GraphConvolution(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros(len(x), self.linear.out_features).index_add(0, edges[1], self.linear(x)[edges[0]])


class GraphNetwork(nn.Module):
    """Graphs of a batch are joined into one: rows are nodes, `graph` says which graph a node is of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = GraphConvolution(6, 16), GraphConvolution(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x, edges)), edges))
        return self.head(torch.zeros(int(graph.max()) + 1, x.shape[1]).index_add(0, graph, x))


@architecture("Graph network")
def graph_network() -> Setup:
    model = GraphNetwork()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sizes = [3 + number % 5 for number in range(EXAMPLES)]
    nodes, labels = [torch.randn(size, 6) for size in sizes], torch.randint(3, (EXAMPLES,))
    rings = [torch.stack([torch.arange(size), (torch.arange(size) + 1) % size]) for size in sizes]

    def joined(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers = ids.tolist()
        starts = torch.tensor([0, *(sizes[n] for n in numbers)]).cumsum(0)
        edges = torch.cat([rings[n] + start for n, start in zip(numbers, starts, strict=False)], dim=1)
        graph = torch.arange(len(numbers)).repeat_interleave(torch.tensor([sizes[n] for n in numbers]))
        return torch.cat([nodes[n] for n in numbers]), edges, graph

    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: F.cross_entropy(model(*joined(ids)), labels[ids])),
        joined(torch.tensor([0])),
        lambda output: output[:, 1],
        "head",
        lambda ids: {"example": ids, "label": labels[ids]},
    )


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.projector = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.encoder(x))


@architecture("SimCLR")
def simclr() -> Setup:
    """Two views of each example in one batch."""
    model = Projected()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    rows = torch.randn(EXAMPLES, 16)

    def loss(ids: Tensor) -> Tensor:
        views = torch.cat([rows[ids] + 0.1 * torch.randn(len(ids), 16), rows[ids] + 0.1 * torch.randn(len(ids), 16)])
        z = F.normalize(model(views), dim=1)
        alike = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(alike, torch.arange(len(z)).roll(len(ids)))

    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, loss),
        torch.randn(1, 16),
        lambda output: output[:, 3],
        "projector.2",
    )


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = (
            nn.GRU(2, 16, num_layers=2, batch_first=True),
            nn.utils.parametrizations.weight_norm(nn.Linear(16, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x)[0][:, -1])


@architecture("GRU forecaster, weight norm")
def forecaster() -> Setup:
    model = Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    series, following = torch.randn(EXAMPLES, 10, 2), torch.randn(EXAMPLES, 1)
    return Setup(
        model,
        optimizer,
        EXAMPLES,
        supervised(model, optimizer, lambda ids: F.mse_loss(model(series[ids]), following[ids])),
        torch.randn(1, 10, 2),
        lambda output: output[:, 0],
        "fc",
    )
