"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells.

The modules run torch's fused kernels as always. Keys are in the inputs and outputs of a module. The kernels return no
gradients of the gates, so errors are computed beside them at the end of the backward pass: the outputs are all states,
which gives the gates of all time steps by one matrix product, and then the gradients go backward through time.
"""

from spotlights.layers.recurrent.adapter import RecurrentAdapter
from spotlights.layers.recurrent.gru import Gru
from spotlights.layers.recurrent.lstm import Lstm
from spotlights.layers.recurrent.recurrence import Rnn

RECURRENT = tuple(RecurrentAdapter(kind) for kind in (Lstm(), Gru(), Rnn("tanh"), Rnn("relu")))
