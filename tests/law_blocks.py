"""Blocks of one's own, each one law of second moments and the same in torch."""

import numpy as np
import torch

import moments
from moments import laws

SQUARE = ("d_model", "d_model")

# --- averages over the tokens before, behind a gate -----------------------------------------------


def average(count):
    return np.tril(np.ones((count, count))) / np.arange(1, count + 1)[:, None]


def gated_law(x, w):
    a = average(x.shape[-1])
    return w.output(laws.activation("sigmoid", w.gate(x)) * (a @ w.value(x) @ a.T))


def gated_twin(x, w):
    a = x.new_tensor(average(x.shape[-2]))
    return w.output(w.gate(x).sigmoid() * (a @ w.value(x)))


GATED = moments.block(
    name="gated average",
    law=gated_law,
    twin=gated_twin,
    weights={"gate": SQUARE, "value": SQUARE, "output": SQUARE},
)

# --- a recurrence h_t = l h_(t-1) + sqrt(1 - l^2) v_t, of a decay l per group of features ---------

DECAYS = np.array([0.5, 0.8, 0.9, 0.95])


def powers(count):
    lag = np.subtract.outer(np.arange(count), np.arange(count))
    one = DECAYS[:, None, None]
    return np.where(lag >= 0, one ** np.maximum(lag, 0) * np.sqrt(1 - one**2), 0.0)


def recurrence_law(x, w):
    value = w.value(x)
    return w.output(sum(a @ value @ a.T for a in powers(x.shape[-1])) / len(DECAYS))


def recurrence_twin(x, w):
    a = x.new_tensor(powers(x.shape[-2]))
    v = w.value(x).unflatten(-1, (len(DECAYS), -1))
    return w.output(torch.einsum("gts,bsgf->btgf", a, v).flatten(-2))


RECURRENCE = moments.block(
    name="recurrence",
    law=recurrence_law,
    twin=recurrence_twin,
    weights={"value": SQUARE, "output": SQUARE},
)

# --- attention with a sink, a key of logit 0 and value 0 ------------------------------------------


def sink_law(x, w):
    """To first order in the logits' variance, a being a row's mean weights beside its sink's."""
    count = np.arange(x.shape[-1])
    a = np.tril(np.ones((count.size, count.size))) / (count + 2)[:, None]
    q, k, v = w.query(x), w.key(x), w.value(x)
    both = a @ (k * v) @ a.T - ((a @ k) * (a @ v)) @ a.T  # logits less their rows' means
    both = both - a @ ((k @ a.T) * (v @ a.T)) + (a @ k @ a.T) * (a @ v @ a.T)

    def curved(q, k):  # E of a logit squared, less its row's mean, by a row alone
        mean = np.diagonal(a @ k @ a.T, 0, -2, -1)[..., :, None]
        square = np.diagonal(k, 0, -2, -1)[..., None, :] - 2 * (a @ k) + mean
        less = np.sum(a * square, -1, keepdims=True) + mean / (count + 2)[:, None]
        return 0.5 * a * np.diagonal(q, 0, -2, -1)[..., :, None] * (square - less)

    one, two = (curved(*own) for own in zip(laws.selves(q), laws.selves(k), strict=True))
    return w.output(a @ v @ a.T + q * both + one @ v @ a.T + a @ v @ np.swapaxes(two, -1, -2))


def sink_twin(x, w):
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (w.query(x), w.key(x), w.value(x)))
    logits = q @ k.mT / q.shape[-1] ** 0.5 + x.new_full(2 * x.shape[1:2], -torch.inf).triu(1)
    weights = torch.cat([logits, 0 * logits[..., :1]], -1).softmax(-1)[..., :-1]
    return w.output((weights @ v).transpose(1, 2).flatten(2))


SINK = moments.block(
    name="sink",
    law=sink_law,
    twin=sink_twin,
    weights=dict.fromkeys(("query", "key", "value", "output"), SQUARE),
)

# --- squared ReLU units, which treat every token alone --------------------------------------------

UNITS = moments.block(
    name="units",
    law=lambda x, w: w.ffn_out(laws.activation("relu_squared", w.ffn_in(x))),
    twin=lambda x, w: w.ffn_out(w.ffn_in(x).relu().square()),
    weights={"ffn_in": ("d_model", "d_ff"), "ffn_out": ("d_ff", "d_model")},
    mixes_tokens=False,
)
