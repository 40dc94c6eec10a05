"""The LSTM cell of `rnn_scan.py` and of the benchmarks; not run by itself.

Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; the forget gate: Gers,
Schmidhuber and Cummins, "Learning to Forget", 2000.
"""

import jax
import jax.numpy as jnp


def lstm_cell(gates, cell):
    """Return hidden and cell state, both (batch, width), after one step.

        c' = sigmoid(f) c + sigmoid(i) tanh(g),   h' = sigmoid(o) tanh(c')

    Args:
        gates: i, f, g and o before their activation, side by side: (batch, 4 * width).
        cell: c, (batch, width).
    """
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell
