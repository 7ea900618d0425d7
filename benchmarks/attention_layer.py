"""One attention layer with tokens alike: Monte Carlo, and the refined laws compared with it.

    python benchmarks/attention_layer.py simulate [--seconds S]   resumes where it stopped
    python benchmarks/attention_layer.py compare                  percentiles of the laws' errors

Three designs, all seeded:

layer   fresh tokens and weights per sample, every path apart, tokens Gaussian or normalised to
        |x|^2 = d. Gradients, value weights and dropout masks enter second moments linearly and are
        integrated out by hand, so what is sampled is tokens, query and key weights only.
beyond  the same at logit variances 5, 8 and 12, where the laws begin to fail.
grid    the published protocol (Kedia et al. 2024, Tables 21 and 22): one draw of everything.

Results are stored with standard errors in `benchmarks/data/attention_layer.json`. Nothing here
shares code with the laws except `predicted`, which evaluates them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import gammaln, hyp2f1

import moments
from moments.engine.state import Kernel
from moments.layers.attention.layers import AlikeLayer

Array = np.ndarray
Config = dict[str, Any]
STORE = Path(__file__).resolve().parent / "data" / "attention_layer.json"

# --- fresh weights, everything linear integrated out ------------------------------------------


def normalised_correlation(r: float, d_model: int) -> float:
    """E cos of the angle between two Gaussian vectors whose entries have correlation r."""
    ratio = np.exp(2 * (gammaln((d_model + 1) / 2) - gammaln(d_model / 2)))
    return float(r * 2 / d_model * ratio * hyp2f1(0.5, 0.5, d_model / 2 + 1, r * r))


def tokens(
    rng: np.random.Generator, samples: int, seq_len: int, d_model: int, r: float, normalised: bool
) -> Array:
    """(samples, seq_len, m): tokens in coordinates of a subspace that holds them all.

    Weights are isotropic, so only inner products of tokens matter. Where L + 1 < d the common
    vector and the L own ones are replaced by their Bartlett factor, m = L + 1.
    """
    count = seq_len + 1
    if count < d_model:
        factor = np.tril(rng.standard_normal((samples, count, count)), -1)
        index = np.arange(count)
        factor[:, index, index] = np.sqrt(rng.chisquare(d_model - index, (samples, count)))
    else:
        factor = rng.standard_normal((samples, count, d_model), dtype=np.float32)
    x = np.sqrt(r) * factor[:, :1] + np.sqrt(1 - r) * factor[:, 1:]
    if normalised:
        x *= np.sqrt(d_model / (x * x).sum(-1, keepdims=True))
    return x.astype(np.float32)


def _transposed(a: Array) -> Array:
    return a.swapaxes(-1, -2)


def _mean_pairs(a: Array) -> Array:
    """Mean over ordered pairs of different tokens of (samples, L, L)."""
    length = a.shape[-1]
    diagonal = np.trace(a, axis1=-2, axis2=-1, dtype=np.float64)
    return (a.sum((-2, -1), dtype=np.float64) - diagonal) / (length * (length - 1))


def _mean_diagonal(a: Array) -> Array:
    return np.trace(a, axis1=-2, axis2=-1, dtype=np.float64) / a.shape[-1]


def sample_layer(
    rng: np.random.Generator,
    samples: int,
    *,
    seq_len: int,
    d_model: int,
    d_head: int,
    correlation: float,
    logit_scale: float,
    normalised: bool,
) -> tuple[dict[str, Array], Array]:
    """Second moments of each sample given its tokens and its query and key weights.

    Gradients arrive as b_i = W_v g_i with E b b^T = 1 (so beta = 1); with D_i = diag(a_i) - a_i
    a_i^T and O = X X^T / d, row i sends dM_i = D_i X b_i to its logits. Names without suffix are
    for gradients independent between tokens; "_mask" is multiplied by p/(1-p); "_pairs" by
    r_g (L - 1), gradients shared by two tokens.

    Returns:
        name -> (samples,), and controls (samples, k) whose expectation is 0.
    """
    x = tokens(rng, samples, seq_len, d_model, correlation, normalised)
    m = x.shape[-1]
    scale = np.float32(np.sqrt(np.sqrt(logit_scale) / d_model))
    wq = scale * rng.standard_normal((samples, m, d_head), dtype=np.float32)
    wk = scale * rng.standard_normal((samples, m, d_head), dtype=np.float32)
    q, k = x @ wq, x @ wk
    outside = np.float32((d_model - m) * scale**2) * np.eye(d_head, dtype=np.float32)
    s = q @ _transposed(k) / np.float32(np.sqrt(d_head))
    w_gram = q @ (_transposed(wk) @ wk + outside) @ _transposed(q) / d_head  # w_i . w_k
    b_gram = k @ (_transposed(wq) @ wq + outside) @ _transposed(k) / d_head  # B x_l . B x_m
    twice = q @ (_transposed(wk) @ wq) @ _transposed(k) / d_head  # w_i . B x_l
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    o = x @ _transposed(x) / d_model
    norm = np.diagonal(o, axis1=-2, axis2=-1)[:, None, :]

    at, a2 = _transposed(a), a * a
    ao, ab = a @ o, a @ b_gram
    aoa = ao @ at
    aba = ab @ at
    aba_own = np.diagonal(aba, axis1=-2, axis2=-1)[..., None]
    overlap = a @ at
    square = a2.sum(-1, keepdims=True)
    logit_mean = (a * s).sum(-1, keepdims=True)
    ds = a * (s - logit_mean)  # D s

    # tr(D_i O D_k) and tr(D_i M D_k O), M = b_gram, by expanding D
    p = a @ _transposed(a * ao)
    dod = (a * norm) @ at - p - _transposed(p) + overlap * aoa
    c = a @ _transposed(ab * ao)
    dmdo = (a @ (b_gram * o)) @ at - c - _transposed(c) + aba * aoa
    column_square = a2 * (1 - 2 * a + square)  # sum_j D_jl^2
    w_norm = np.diagonal(w_gram, axis1=-2, axis2=-1)
    b_norm = np.diagonal(b_gram, axis1=-2, axis2=-1)[:, None, :]

    trace_ds = (a * np.diagonal(s, axis1=-2, axis2=-1)[:, None, :]).sum(-1) - ((a @ s) * a).sum(-1)
    # (D_k O D_i N_k)_i of K_i from row k against Q_i: `qk[k, i]`
    u_a = (o * a).sum(-1)[:, None, :] - aoa
    inner = twice @ _transposed(o * a) - (ao * twice) @ at - u_a * (twice @ at)
    qk = a * inner
    vq = a * trace_ds[:, None, :]  # [i, j]: V_j from row i against Q_j

    def rows(values: Array) -> Array:
        return values.sum((-2, -1), dtype=np.float64) / seq_len

    values = {
        "row_square": rows(a2),
        "overlap": _mean_pairs(overlap),
        "average": _mean_diagonal(aoa),
        "average_mask": rows(a2 * norm),
        "average_pairs": _mean_pairs(aoa),
        "query": _mean_diagonal(dmdo),
        "query_mask": rows(norm * a2 * (b_norm - 2 * ab + aba_own)),
        "query_pairs": _mean_pairs(dmdo),
        "key": _mean_diagonal(dod * w_gram),
        "key_mask": rows(column_square * norm * w_norm[..., None]),
        "key_pairs": _mean_pairs(dod * w_gram),
        "cross": 2 / d_model * rows(a * ds),
        "cross_mask": 2 / d_model * rows(a2 * (1 - a) * (s - s.mean(-1, keepdims=True))),
        "cross_pairs": 2 / d_model * _mean_pairs(a @ _transposed(ds)),
        "value_query": 2 / d_model * _mean_diagonal(vq),
        "value_query_pairs": 2 / d_model * _mean_pairs(vq),
        "query_key": 2 * _mean_diagonal(qk),
        "query_key_pairs": 2 * _mean_pairs(qk),
    }
    truth = normalised_correlation(correlation, d_model) if normalised else correlation
    controls = [
        _mean_diagonal(w_gram) / logit_scale - 1,
        _mean_pairs(w_gram) / logit_scale - truth,
        _mean_pairs(o) - truth,
        _mean_diagonal(b_gram) / logit_scale - 1,
        *_logit_controls(s, x, logit_scale / d_model**2),
    ]
    if not normalised:
        controls.append(_mean_diagonal(o) - 1)
    return values, np.stack(controls, -1)


def _logit_controls(s: Array, x: Array, scale: float) -> list[Array]:
    """Empirical variance and skewness of the logits over keys, less their expectation given X.

    s_ij = x_i.B x_j with isotropic B: E_B (u.B v)^2 = scale |u|^2 |v|^2, and odd moments vanish.
    """
    centred = s - s.mean(-1, keepdims=True)
    common = centred.mean(-2)
    own = x - x.mean(-2, keepdims=True)
    spread = (own * own).sum(-1).mean(-1, dtype=np.float64)
    norm = (x * x).sum(-1).mean(-1, dtype=np.float64)
    common_norm = (x.mean(-2) ** 2).sum(-1)
    return [
        (common**2).mean(-1) - scale * common_norm * spread,
        (centred**2).mean((-2, -1)) - scale * norm * spread,
        (common**3).mean(-1),
        (centred**3).mean((-2, -1)),
    ]


PATHS = ("value", "query", "key", "cross")


def combined(v: dict[str, Array], seq_len: int, drop_prob: float, r_g: float) -> dict[str, Array]:
    """Moments at one dropout probability and gradient correlation, from `sample_layer`'s parts."""
    masks, others = drop_prob / (1 - drop_prob), r_g * (seq_len - 1)

    def path(name: str) -> Array:
        return v[name] + masks * v.get(f"{name}_mask", 0.0) + others * v[f"{name}_pairs"]

    parts = {
        "variance": v["average"] + masks * v["average_mask"],
        "covariance": v["average_pairs"],
        "value": v["row_square"] / (1 - drop_prob) + others * v["overlap"],
        "query": v["query"] + masks * v["query_mask"],
        "key": path("key"),
        "cross": path("cross"),
        "rest": path("value_query") + path("query_key"),
    }
    parts["grad_variance"] = sum(parts[name] for name in (*PATHS, "rest"))
    value_covariance = (1 - v["row_square"]) / (seq_len - 1) + r_g * (1 - v["overlap"])
    fed_back = parts["key"] + parts["cross"] + parts["rest"]
    parts["grad_covariance"] = value_covariance + r_g * v["query_pairs"] - fed_back / (seq_len - 1)
    return parts


def estimate(values: Array, controls: Array) -> list[float]:
    """Mean and standard error of `values` (samples,) after regression on the controls."""
    centred = values - values.mean()
    coefficients, *_ = np.linalg.lstsq(controls - controls.mean(0), centred, rcond=None)
    residual = values - controls @ coefficients
    count = len(values)
    error = residual.std(ddof=1 + controls.shape[1]) / np.sqrt(count)
    return [float(f"{residual.mean():.7g}"), float(f"{error:.2g}")]


def simulate_layer(config: Config, seconds: float, most: int, target: float) -> dict[str, Any]:
    """Sample until the gradient variance's standard error is below `target`, or time is up."""
    rng = np.random.default_rng(config["seed"])
    length = config["seq_len"]
    design = {name: config[name] for name in ("seq_len", "d_model", "d_head", "normalised")}
    correlation = config["correlation"]
    truth = (
        normalised_correlation(correlation, config["d_model"])
        if config["normalised"]
        else correlation
    )
    batch = int(np.clip(4e5 / (length * length + length * config["d_head"]), 1, 2000))
    parts: list[dict[str, Array]] = []
    controls: list[Array] = []
    start, count = time.monotonic(), 0
    while True:
        values, control = sample_layer(
            rng,
            batch,
            **design,
            correlation=correlation,
            logit_scale=config["theta"] / (1 - truth),
        )
        parts.append(values)
        controls.append(control)
        count += batch
        if count % (10 * batch) and count < most:
            continue
        if count < 60:
            continue
        joined = {name: np.concatenate([p[name] for p in parts]) for name in values}
        moments = combined(joined, length, config["drop_prob"], config["grad_correlation"])
        stacked = np.concatenate(controls)
        mean, error = estimate(moments["grad_variance"], stacked)
        if error < target * mean or count >= most or time.monotonic() - start > seconds:
            break
    result = {name: estimate(series, stacked) for name, series in moments.items()}
    for name in ("row_square", "overlap", "query", "query_mask", "query_pairs"):
        result[f"part_{name}"] = estimate(joined[name], stacked)
    for name in ("key", "key_mask", "key_pairs"):
        result[f"part_{name}"] = estimate(joined[name], stacked)
    return {"config": {**config, "correlation": truth}, "samples": count, "result": result}


# --- the published protocol: one draw ---------------------------------------------------------


def simulate_draw(config: Config) -> dict[str, Any]:
    """Variances and token covariances under one draw of all weights, averaged over inputs."""
    rng = np.random.default_rng(config["seed"])
    length, d_model, d_head = config["seq_len"], config["d_model"], config["d_head"]

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    def alike(width: int, correlation: float) -> tuple[Array, Array]:
        common = np.float32(np.sqrt(correlation)) * normal(1, width)
        z = common + np.float32(np.sqrt(1 - correlation)) * normal(length, width)
        return z, z.mean(0) / np.float32(np.sqrt(correlation + (1 - correlation) / length))

    scale = np.float32(np.sqrt(config["weight_variance"]))
    wq, wk = scale * normal(d_model, d_head), scale * normal(d_model, d_head)
    wv = normal(d_model, d_head) / np.float32(np.sqrt(d_model))
    root = np.float32(np.sqrt(d_head))
    kept = np.float32(1 - config["drop_prob"])
    inputs = int(np.clip(1e11 / (length * length * (8 * d_model + 400)), 12, 80))
    draws, controls = [], []
    norm = (wv * wv).sum()
    for _ in range(inputs):
        x, common = alike(d_model, config["correlation"])
        g, common_gradient = alike(d_head, config["grad_correlation"])
        q, k, v = x @ wq, x @ wk, x @ wv
        a = q @ k.T / root
        a = np.exp(a - a.max(-1, keepdims=True))
        a /= a.sum(-1, keepdims=True)
        dropped = a * (rng.random((length, length), dtype=np.float32) < kept) / kept
        weighted = dropped * (g @ v.T)
        logits = weighted - a * weighted.sum(-1, keepdims=True)
        sent = dropped.T @ (g @ wv.T) + logits @ k @ wq.T / root + logits.T @ q @ wk.T / root
        draws.append((*_moments(dropped @ v), *_moments(sent)))
        # The mean token through the value weights, forward and back: of known mean given those.
        ends = common @ wv, wv @ common_gradient
        controls.append([float((end * end).sum() / norm) - 1 for end in ends])
    names = ("variance", "covariance", "grad_variance", "grad_covariance")
    stacked = np.array(controls)
    result = {
        name: estimate(series, stacked)
        for name, series in zip(names, np.array(draws).T, strict=True)
    }
    return {"config": config, "samples": inputs, "result": result}


def _moments(z: Array) -> tuple[float, float]:
    """Mean square of the entries of (L, width), and mean product between two tokens."""
    own = float((z * z).sum(dtype=np.float64))
    total = float((z.sum(0, dtype=np.float64) ** 2).sum())
    length, width = z.shape
    return own / (length * width), (total - own) / (length * (length - 1) * width)


# --- designs ----------------------------------------------------------------------------------

SEED = 20240607


def _choose(rng: np.random.Generator, options: dict[str, tuple]) -> Config:
    return {name: values[rng.integers(len(values))] for name, values in options.items()}


def _even(configs: list[Config]) -> list[Config]:
    return [{**config, "seed": SEED + i} for i, config in enumerate(configs)]


def layer_design(count: int = 90) -> list[Config]:
    """`count` settings of each kind of token, drawn independently for the two kinds."""
    rng = np.random.default_rng(SEED)
    options = {
        "seq_len": (4, 8, 16, 64, 300),
        "d_model": (128, 256, 512),
        "d_head": (16, 32, 64, 128),
        "correlation": (0.0, 0.1, 0.3, 0.6, 0.9),
        "drop_prob": (0.0, 0.1, 0.3),
        "theta": (0.25, 0.5, 1.0, 2.0, 3.5),
        "grad_correlation": (0.0, 0.4),
    }
    return _even(
        [
            {"normalised": normalised, **_choose(rng, options)}
            for _ in range(count)
            for normalised in (True, False)
        ]
    )


def beyond_design() -> list[Config]:
    return _even(
        [
            {
                "normalised": True,
                "seq_len": seq_len,
                "d_model": d_model,
                "d_head": 64,
                "correlation": r,
                "drop_prob": 0.1,
                "theta": theta,
                "grad_correlation": 0.2,
            }
            for theta in (5.0, 8.0, 12.0)
            for seq_len in (16, 300)
            for d_model in (256, 768)
            for r in (0.0, 0.3, 0.6)
        ]
    )


def grid_design(count: int = 320) -> list[Config]:
    """A seeded subset of the published grid; query and key weights' standard deviations are
    .1, .245 and .6 over sqrt(d), so that d^2 query key is 1e-4 to .13."""
    rng = np.random.default_rng(SEED + 1)
    options = {
        "seq_len": (300, 547, 1000),
        "d_model": (100, 316, 1000),
        "d_head": (32, 64, 128, 256),
        "correlation": (0.0, 1 / 3, 2 / 3),
        "drop_prob": (0.0, 1 / 3, 2 / 3),
        "grad_correlation": (0.0, 1 / 3, 2 / 3),
        "logit_scale": (0.1**4, 0.06**2, 0.6**4),
    }
    configs = []
    for _ in range(count):
        config = _choose(rng, options)
        config["weight_variance"] = config.pop("logit_scale") ** 0.5 / config["d_model"]
        configs.append(config)
    return _even(configs)


def simulate(seconds: float) -> None:
    """Fill the store up, one setting after the other, for at most `seconds`."""
    store = json.loads(STORE.read_text()) if STORE.exists() else {}
    start = time.monotonic()
    jobs = [
        ("layer", layer_design(), lambda c: simulate_layer(c, 15.0, 60_000, 2e-3)),
        ("grid", grid_design(), simulate_draw),
        ("beyond", beyond_design(), lambda c: simulate_layer(c, 8.0, 30_000, 3e-3)),
    ]
    for name, design, run in jobs:
        done = store.setdefault(name, [])
        for config in design[len(done) :]:
            if time.monotonic() - start > seconds:
                return
            done.append(run(config))
            partial = STORE.with_suffix(".tmp")
            partial.write_text(json.dumps(store, separators=(",", ":")))
            partial.replace(STORE)


# --- comparison -------------------------------------------------------------------------------


def predicted(config: Config) -> dict[str, float]:
    """What attention over keys that are alike says of one setting of "layer" and "beyond"."""
    correlation, d_model = config["correlation"], float(config["d_model"])
    tokens = Kernel(1.0, correlation)
    layer = AlikeLayer(
        tokens,
        tokens,
        tokens,
        query_count=config["seq_len"],
        key_count=config["seq_len"],
        scale=config["theta"] / (1 - correlation),
        drop_prob=config["drop_prob"],
        d_model=d_model,
        d_head=config["d_head"],
        norm_spread=0.0 if config["normalised"] else 2 / d_model,
    )
    output = layer.forward()
    paths = layer.backward(Kernel(1.0, config["grad_correlation"]))._asdict()
    return {
        "variance": float(output.diagonal),
        "covariance": float(output.off_diagonal),
        **{name: float(path.diagonal) for name, path in paths.items()},
        "grad_variance": float(sum(path.diagonal for path in paths.values())),
        "grad_covariance": float(sum(path.off_diagonal for path in paths.values())),
    }


def predicted_draw(config: Config) -> dict[str, float]:
    """The refined laws on one setting of the design "grid"."""
    r, d_model = config["correlation"], config["d_model"]
    theta = (1 - r) * (d_model * config["weight_variance"]) ** 2
    layer = predicted({**config, "theta": theta, "normalised": False})
    gain = config["d_head"] / d_model
    return {
        name: layer[name] * (gain if name.startswith("grad") else 1.0)
        for name in ("variance", "covariance", "grad_variance", "grad_covariance")
    }


def published_draw(config: Config) -> dict[str, float]:
    """The published laws on one setting of the design "grid"."""
    laws = moments.component("attention").under("published")
    values = {
        "d_model": config["d_model"],
        "fan_out": config["d_head"],
        "seq_len": config["seq_len"],
        "query": config["weight_variance"],
        "key": config["weight_variance"],
        "value": 1 / config["d_model"],
        "drop_prob": config["drop_prob"],
        "x_variance": 1.0,
        "x_correlation": config["correlation"],
        "grad_variance": 1.0,
        "grad_covariance": config["grad_correlation"],
    }
    names = ("variance", "covariance", "grad_variance", "grad_covariance")
    return {name: float(laws[name].of(values)) for name in names}


def errors(
    entries: list[dict[str, Any]], theory: Callable[[Config], dict[str, float]], errors_off: float
) -> dict[str, Array]:
    """Relative error in per cent of every moment, beyond `errors_off` standard errors."""
    collected: dict[str, list[float]] = {}
    for entry in entries:
        for name, value in theory(entry["config"]).items():
            mean, error = entry["result"][name]
            beyond = max(abs(value - mean) - errors_off * error, 0.0)
            collected.setdefault(name, []).append(100 * beyond / abs(mean))
    return {name: np.array(series) for name, series in collected.items()}


def load() -> dict[str, list[dict[str, Any]]]:
    """The stored results, by design."""
    return json.loads(STORE.read_text())


def of_kind(entries: list[dict[str, Any]], normalised: bool, low: float, high: float) -> list:
    """Entries with this kind of token and low <= theta <= high."""
    return [
        entry
        for entry in entries
        if entry["config"]["normalised"] == normalised and low <= entry["config"]["theta"] <= high
    ]


def _print(title: str, table: dict[str, Array]) -> None:
    print(f"{title} ({len(next(iter(table.values())))} settings): % at 50/90/99 percentile")
    for name, series in table.items():
        print(f"  {name:16s} " + "  ".join(f"{p:.2f}" for p in np.percentile(series, (50, 90, 99))))


def compare() -> None:
    store = load()
    for normalised in (True, False):
        kind = "normalised tokens" if normalised else "Gaussian tokens"
        for low, high in ((0.0, 2.0), (2.5, 4.0)):
            entries = of_kind(store["layer"], normalised, low, high)
            noise = [
                100 * e["result"]["grad_variance"][1] / e["result"]["grad_variance"][0]
                for e in entries
            ]
            title = f"{kind}, theta in [{low}, {high}], noise {np.median(noise):.2f} %"
            _print(f"{title}, beyond 2 s.e.", errors(entries, predicted, 2.0))
            _print(f"{title}, whole", errors(entries, predicted, 0.0))
    _print("one weight draw, refined", errors(store["grid"], predicted_draw, 0.0))
    _print("one weight draw, published", errors(store["grid"], published_draw, 0.0))
    for theta in (5.0, 8.0, 12.0):
        _print(
            f"theta {theta}", errors(of_kind(store["beyond"], True, theta, theta), predicted, 0.0)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("simulate", "compare"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after")
    arguments = parser.parse_args()
    if arguments.command == "simulate":
        simulate(arguments.seconds)
    else:
        compare()


if __name__ == "__main__":
    main()
