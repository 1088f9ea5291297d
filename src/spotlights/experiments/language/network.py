"""The paper's language model: an embedding, one LSTM, and a softmax over the vocabulary."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from spotlights.experiments.language.settings import LanguageSettings

State = tuple[Float[Tensor, "layers batch hidden"], Float[Tensor, "layers batch hidden"]]

LAYER = "rnn.l0"
"""The layer that is asked about: its key is what the LSTM sees at a token, `[x; h of the token before]`."""


class LanguageModel(nn.Module):
    """Tokens in, the logarithms of the chances of each next token out. It starts from an empty state."""

    def __init__(self, tokens: int, settings: LanguageSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, settings.embedding, sparse=settings.sparse)
        if settings.initial_embedding is not None:
            nn.init.uniform_(self.embedding.weight, -settings.initial_embedding, settings.initial_embedding)
        inputs = settings.embedding
        self.projection: nn.Module = nn.Identity()
        if settings.projection is not None:
            self.projection, inputs = nn.Linear(inputs, settings.projection), settings.projection
        self.dropout = nn.Dropout(settings.dropout)
        self.output_dropout = nn.Dropout(settings.output_dropout)
        self.rnn = nn.LSTM(inputs, settings.hidden, batch_first=True)
        cutoffs = [cutoff for cutoff in settings.cutoffs if cutoff < tokens - 1]
        self.decoder: nn.Module = (
            nn.AdaptiveLogSoftmaxWithLoss(settings.hidden, tokens, cutoffs)
            if cutoffs
            else nn.Linear(settings.hidden, tokens)
        )

    def read(
        self, tokens: Int64[Tensor, "batch length"], state: State | None = None
    ) -> tuple[Float[Tensor, "batch length hidden"], State]:
        """What the LSTM makes of the tokens, and the state it is left in."""
        return self.rnn(self.dropout(self.projection(self.embedding(tokens))), state)

    def forward(
        self, tokens: Int64[Tensor, "batch length"], *, last: bool = False
    ) -> Float[Tensor, "batch places tokens"]:
        """The logarithms of the chances of the token that follows each one, or only the last one."""
        hidden = self.read(tokens)[0]
        hidden = hidden[:, -1:] if last else hidden
        if isinstance(self.decoder, nn.AdaptiveLogSoftmaxWithLoss):
            return self.decoder.log_prob(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return self.decoder(hidden).log_softmax(dim=-1)

    def loss(
        self, tokens: Int64[Tensor, "batch length"], targets: Int64[Tensor, "batch length"], state: State | None
    ) -> tuple[Float[Tensor, ""], State]:
        """The mean surprise at the targets, in nats, and the state the LSTM is left in."""
        hidden, state = self.read(tokens, state)
        rows = self.output_dropout(hidden).flatten(0, 1)
        if isinstance(self.decoder, nn.AdaptiveLogSoftmaxWithLoss):
            return self.decoder(rows, targets.flatten()).loss, state
        return F.cross_entropy(self.decoder(rows), targets.flatten()), state


@torch.no_grad()
def surprise(model: LanguageModel, tokens: Int64[Tensor, "tokens"], *, block: int = 2000) -> float:
    """The mean surprise at each token of a text after its first one, in nats, read in one go."""
    training = model.training
    model.eval()
    state: State | None = None
    total = 0.0
    for start in range(0, len(tokens) - 1, block):
        stop = min(start + block, len(tokens) - 1)
        loss, state = model.loss(tokens[None, start:stop], tokens[None, start + 1 : stop + 1], state)
        total += float(loss) * (stop - start)
    model.train(training)
    return total / (len(tokens) - 1)
