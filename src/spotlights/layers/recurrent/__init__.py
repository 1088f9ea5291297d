"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells.

The modules run torch's fused kernels as usual. Keys are parts of a module's inputs and outputs. The kernels return no
gradients of the gates, so Spotlights computes the errors at the end of the backward pass: the outputs contain all
states, one matrix product gives the gates of all time steps, and then the gradients go backward through time.
"""

from spotlights.layers.recurrent.gru import GruAdapter
from spotlights.layers.recurrent.lstm import LstmAdapter
from spotlights.layers.recurrent.rnn import RnnAdapter

RECURRENT = (LstmAdapter(), GruAdapter(), RnnAdapter("tanh"), RnnAdapter("relu"))
