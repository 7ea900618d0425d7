"""The moments of the tensor that enters layer 1: from an embedding, a text, or the user."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..engine.classes import MOST_WINDOWS, PositionClasses
from ..engine.state import Array, Fluctuation, Kernel, Signal
from ..engine.texts import TextClasses
from ..engine.trace import Run
from ..errors import DomainError, domain_error
from ..formulas.checks import NONNEGATIVE, POSITIVE, Interval, check_array, check_in
from ..formulas.law import Theory
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from ..transfer.architecture import declare_embedding
from ..transfer.embedding import (
    FixedPart,
    check_ids,
    class_kernel,
    drawn_alike,
    embedded_alike,
    fixed_positions,
    joint_kernel,
)


def check_moments(
    prefix: str, variance: Any, correlation: Any, seq_len: int
) -> tuple[Array, Array]:
    """Validate a variance and a token correlation, shape (...,); floats where both are scalars.

    Raises:
        DomainError: a variance that is not positive (or, for a gradient, negative), a correlation
            below -1/(L-1), which no L tokens can share, or above 1.
    """
    interval = NONNEGATIVE if prefix else POSITIVE
    check_in(f"{prefix}variance", variance, interval, "pass a variance, not a deviation")
    if seq_len == 1 and np.any(np.asarray(correlation) != 0):
        remedy = "one token has no pairs: leave it out"
        raise domain_error(f"{prefix}correlation", correlation, "0 where seq_len is 1", remedy)
    least = -1.0 / max(seq_len - 1, 1)
    check_in(
        f"{prefix}correlation",
        correlation,
        Interval(least, 1.0),
        f"{seq_len} tokens cannot all correlate below -1/(seq_len - 1) = {least:.4g}",
    )
    if np.ndim(variance) == 0 and np.ndim(correlation) == 0:
        return float(variance), float(correlation)
    try:
        v, r = np.broadcast_arrays(np.asarray(variance, float), np.asarray(correlation, float))
    except ValueError:
        shapes = f"{np.shape(variance)} and {np.shape(correlation)}"
        raise DomainError(
            f"{prefix}variance and {prefix}correlation of shapes {shapes} must broadcast"
        ) from None
    return v, r


def alike(
    variance: Array, correlation: Array, seq_len: int, resolved: bool | PositionClasses
) -> Kernel:
    """Tokens alike, in any resolution."""
    if not resolved:
        return Kernel(variance, variance * correlation)
    if isinstance(resolved, PositionClasses):
        v, c = np.asarray(variance, float), np.asarray(variance * correlation, float)
        size = len(resolved.nodes)
        own = np.broadcast_to(v[..., None], (*v.shape, size))
        return Kernel(own, np.broadcast_to(c[..., None, None], (*c.shape, size, size)), resolved)
    v, c = np.asarray(variance, float), np.asarray(variance * correlation, float)
    matrix = np.broadcast_to(c[..., None, None], (*c.shape, seq_len, seq_len))
    diagonal = np.broadcast_to(v[..., None], (*v.shape, seq_len))
    return Kernel(diagonal, matrix, True).with_diagonal(diagonal)


def gaussian(
    kernel: Kernel, seq_len: int, d_model: int, spread: bool, fixed: FixedPart | None = None
) -> Signal:
    """Independent Gaussian features; their squared norms vary by 2 C o C / d.

    With a fixed part, x = e + p, Cov(|x_i|^2, |x_j|^2) = 2 d E_ij^2 + 4 d E_ij P_ij, that is
    2 d (C_ij^2 - P_ij^2); and the mean over features is that of p, beside the 1/d of e.
    """
    mean = 0.0 * kernel.diagonal
    signal = Signal(kernel, seq_len, mean=mean, width=d_model)
    if spread:
        drawn = kernel * kernel if fixed is None else kernel * kernel - fixed.kernel * fixed.kernel
        norms = drawn.scaled(2 / d_model)
        signal = signal.replace(fluctuation=Fluctuation(norms, norms))
    if spread and fixed is not None:
        # What is not centred counts d times its mean's square.
        signal = signal.replace(centred=fixed.kernel - fixed.common.scaled(float(d_model)))
    return signal


def check_kernel(name: str, kernel: Any, seq_len: int) -> Kernel:
    """Token-resolved second moments given by the user.

    Raises:
        DomainError: not a finite symmetric (..., L, L) array, or not positive on the diagonal.
    """
    matrix = check_array(name, kernel, f"of shape (..., {seq_len}, {seq_len})")
    if matrix.ndim < 2 or matrix.shape[-2:] != (seq_len, seq_len):
        raise domain_error(name, f"shape {matrix.shape}", f"of shape (..., {seq_len}, {seq_len})")
    if not np.all(np.isfinite(matrix)):
        raise domain_error(name, "NaN or infinity", "finite")
    scale = np.abs(matrix).max()
    if not np.allclose(matrix, np.swapaxes(matrix, -1, -2), atol=1e-9 * scale, rtol=0):
        raise domain_error(name, "not symmetric", "symmetric in its last two axes")
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    if name == "kernel" and diagonal.min() <= 0:
        raise domain_error(name, float(diagonal.min()), "positive on its diagonal")
    if np.linalg.eigvalsh(matrix).min() < -1e-9 * scale:
        raise domain_error(name, "not positive semidefinite", "a matrix of second moments")
    return Kernel.of_matrix((matrix + np.swapaxes(matrix, -1, -2)) / 2)


def given_shape(value: Any) -> tuple[int, ...]:
    """Shape of an argument; () where it is not given, or no array, which others refuse."""
    try:
        return () if value is None else np.shape(value)
    except ValueError:
        return ()


def configurations(**arrays: Any) -> tuple[int, ...]:
    """Shape that the configurations of several arguments share.

    Args:
        arrays: shapes by name.

    Raises:
        DomainError: they do not broadcast.
    """
    try:
        return np.broadcast_shapes(*arrays.values())
    except ValueError:
        given = ", ".join(f"{name} {shape}" for name, shape in arrays.items() if shape)
        raise DomainError(
            f"configurations of different shapes: {given}; arrays must broadcast"
        ) from None


NUMBERS = {True: (0, 200), False: (30_000, 300)}
"""Numbers that a prediction and its band keep per layer, alone and per configuration and pair of
tokens: measured, 140 and 200 under a causal mask of 128 to 512 tokens; by resolution."""


POSITIONS = 12
"""Numbers for every position of a sequence on classes beside what `Prediction` keeps by token:
measured, 8 at 1e6 and 1e7 of them."""


def check_memory(
    model: Transformer, resolved: bool, configurations: int, tokens: int, positions: int = 0
) -> None:
    """Refuse what this machine's memory cannot hold, before anything is made.

    Args:
        model, configurations: what is predicted.
        resolved: whether tokens are told apart, one by one or by classes.
        tokens: of those.
        positions: of a sequence on classes, of which variances are kept one by one.

    Raises:
        DomainError: says how much it would be.
    """
    alone, each = NUMBERS[resolved]
    pairs = float(tokens) ** 2 if resolved else 1.0
    needed = 8.0 * model.layers * (alone + each * configurations * pairs)
    needed += 8.0 * positions * (POSITIONS + 2.0 * (model.layers + 1) * configurations)
    there = memory()
    if needed > there:
        what = f"{tokens} tokens, each with every other" if resolved else "tokens alike"
        what = f"{positions} positions" if positions else what
        windows = [window for window in model.windows if window is not None]
        most = MOST_WINDOWS * min(windows, default=model.seq_len)
        if resolved and most < model.seq_len:
            what += f" (classes of positions hold windows of {min(windows)} up to seq_len = {most})"
        raise DomainError(
            f"{model.layers} layers of {what} in {configurations} configurations need about "
            f"{needed / 2**30:.3g} GiB of memory, and {there / 2**30:.3g} GiB are there: use fewer "
            f"{'or shorter sequences (seq_len)' if resolved else 'configurations'}, or fewer layers"
        )


def memory() -> float:
    """Bytes of memory that this machine has; 2**34 where it does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2.0**34


def check_mask(mask: Any, seq_len: int, token_ids: Any) -> np.ndarray:
    """Which tokens are real, as 0.0 and 1.0: (B, L) beside token_ids of that shape, else (L,).

    Raises:
        DomainError: another shape, other values, or a sequence with fewer than two real tokens.
    """
    real = check_array("attention_mask", mask, "0 or 1, of shape (L,) or (B, L)")
    shape = (seq_len,) if token_ids is None else check_ids(token_ids, seq_len, "token_ids").shape
    if real.shape == (seq_len,):
        real = np.broadcast_to(real, shape)
    if real.shape != shape:
        raise domain_error("attention_mask", f"shape {real.shape}", f"of shape {shape}")
    if not np.all((real == 0) | (real == 1)) or np.any(real.sum(-1) < min(2, seq_len)):
        raise domain_error("attention_mask", mask, "0 or 1, with two real tokens at least")
    return real


def first_kernel(
    model: Transformer,
    theory: Theory,
    resolved: bool | PositionClasses,
    variance: Any,
    correlation: Any,
    token_ids: Any,
    segment_ids: Any,
    kernel: Any,
    documents: np.ndarray | None = None,
) -> Kernel:
    """What the user, a text or the embedding says of the tensor that enters layer 1.

    A text resolved by token is one kernel (B L, B L).

    Raises:
        DomainError: more than one of them, or a bad value.
    """
    moments_given = variance is not None or correlation is not None
    embedding = model.embedding
    if kernel is not None:
        if moments_given or token_ids is not None:
            raise DomainError("kernel replaces variance, correlation and token_ids: give one")
        return check_kernel("kernel", kernel, model.seq_len)
    if token_ids is not None and (moments_given or not isinstance(embedding, Embedding)):
        raise DomainError(
            "token_ids describe the text an embedding reads: declare model.embedding and leave "
            "variance and correlation out"
        )
    if embedding is None or moments_given:
        unsaid = (1.0, 0.0)
        if isinstance(embedding, Embedding) and (variance is None or correlation is None):
            unsaid = embedded(model, theory)
        v, r = check_moments(
            "",
            unsaid[0] if variance is None else variance,
            unsaid[1] if correlation is None else correlation,
            model.seq_len,
        )
        return alike(v, r, model.seq_len, resolved)
    if not isinstance(embedding, Embedding):
        raise DomainError(
            "a patch embedding's moments depend on its images: pass pixels (see "
            "moments.transfer.images.photograph), or variance and correlation"
        )
    if token_ids is not None and isinstance(resolved, PositionClasses):
        return class_kernel(embedding, resolved, token_ids, model.d_model)
    if token_ids is not None and resolved:
        return joint_kernel(
            embedding, model.seq_len, token_ids, segment_ids, model.d_model, documents
        )
    if not resolved:
        alone = embedding, model.seq_len, theory, token_ids, segment_ids, model.d_model
        tables = embedded_alike(*alone)
        return alike(tables.diagonal, tables.pairs / tables.diagonal, model.seq_len, False)
    tables = drawn_alike(embedding, model.seq_len, theory, token_ids, segment_ids)
    if isinstance(resolved, TextClasses):
        return class_kernel(embedding, resolved, token_ids, model.d_model)
    found = alike(tables.diagonal, tables.pairs / tables.diagonal, model.seq_len, resolved)
    fixed = placed_positions(model, resolved, 1, documents)
    return found if fixed is None else found + fixed.kernel


def embedded(model: Transformer, theory: Theory) -> tuple[float, float]:
    """Variance and correlation of what the embedding makes of tokens alike, norm and dropout in."""
    embedding = model.embedding
    assert isinstance(embedding, Embedding)
    tables = embedded_alike(embedding, model.seq_len, theory, d_model=model.d_model)
    signal = gaussian(tables, model.seq_len, model.d_model, theory == "refined")
    made = declare_embedding(embedding, model, theory).propagate(signal, Run()).output
    return float(made.kernel.diagonal), float(made.correlation())


def placed_positions(
    model: Transformer,
    resolved: bool | PositionClasses,
    sequences: int,
    documents: np.ndarray | None,
) -> FixedPart | None:
    """Sinusoidal positions in any resolution; None where there are none."""
    assert isinstance(model.embedding, Embedding)
    classes = resolved if isinstance(resolved, PositionClasses) else None
    several = sequences if resolved else None
    length, width = model.seq_len, model.d_model
    return fixed_positions(model.embedding, length, width, several, documents, classes)


def last_kernel(
    model: Transformer,
    resolved: bool | PositionClasses,
    variance: Any,
    correlation: Any,
    kernel: Any,
    sequences: int = 1,
) -> Kernel:
    """The gradient at the last layer's output; 1 and 0 where nothing is given.

    Several sequences receive independent gradients, of the same moments or of a kernel each, unless
    the kernel given is that of all their tokens.

    Raises:
        DomainError: a kernel and moments together, or a bad value.
    """
    if kernel is None:
        v, r = check_moments(
            "grad_",
            1.0 if variance is None else variance,
            0.0 if correlation is None else correlation,
            model.seq_len,
        )
        one = alike(v, r, model.seq_len, resolved)
        if sequences == 1:
            return one
        if isinstance(resolved, PositionClasses):
            size = len(resolved.inside.nodes)
            return Kernel(
                one.diagonal, one.pairs * resolved.within(np.ones((size, size))), resolved
            )
        return Kernel.of_matrix(np.kron(np.eye(sequences), one.pairs))
    if variance is not None or correlation is not None:
        raise DomainError("grad_kernel replaces grad_variance and grad_correlation: give one")
    if sequences > 1 and np.shape(kernel)[-1:] == (sequences * model.seq_len,):
        return check_kernel("grad_kernel", kernel, sequences * model.seq_len)
    given = check_kernel("grad_kernel", kernel, model.seq_len)
    if sequences == 1:
        return given
    length = model.seq_len
    joint = np.zeros((sequences, length, sequences, length))
    index = np.arange(sequences)
    joint[index, :, index, :] = given.pairs
    return Kernel.of_matrix(joint.reshape(sequences * length, sequences * length))
