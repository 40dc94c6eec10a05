"""The LSTM of the convergence benchmark, compared with the textbook's cell."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._models import lstm


def test_the_docstring_example_runs():
    assert doctest.testmod(lstm) == (0, 3)


def test_the_lstm_is_causal():
    params = lstm.init(jax.random.key(0), width=8)
    tokens = jnp.array([[3, 1, 4, 1, 5]])
    other = tokens.at[0, 2].set(200)
    one, two = lstm.apply(params, tokens), lstm.apply(params, other)
    changed = jnp.any(one != two, axis=-1)[0]
    assert changed.tolist() == [False, False, True, True, True]
    assert float(lstm.loss(params, tokens)) == pytest.approx(np.log(256), rel=0.02)


def test_the_lstm_is_the_textbook_cell():
    params = lstm.init(jax.random.key(1), width=3)
    x = np.asarray(params["tokens"])[[7, 9]]
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    for name in lstm.LAYERS:
        layer = {key: np.asarray(leaf) for key, leaf in params[name].items()}
        h, c, out = np.zeros(3), np.zeros(3), []
        for row in x:
            gates = row @ layer["input"] + h @ layer["hidden"] + layer["b"]
            i, f, g, o = np.split(gates, 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            out.append(h)
        x = np.stack(out)
    logits = x @ np.asarray(params["head"]["w"]) + np.asarray(params["head"]["b"])
    found = lstm.apply(params, jnp.array([[7, 9]]))[0]
    np.testing.assert_allclose(found, logits, atol=1e-6)
