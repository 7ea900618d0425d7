"""Every component by name, so that a user can ask for a formula and a test can walk them all."""

from __future__ import annotations

from .errors import domain_error
from .law import ComponentLaws
from .laws import activation, attention, block, embedding, linear, noci, normalization, softmax

_ALL = (
    embedding.TOKEN_EMBEDDING,
    embedding.SEGMENT_EMBEDDING,
    embedding.POSITION_EMBEDDING,
    linear.LINEAR,
    linear.DROPOUT,
    linear.SCALE,
    activation.RELU,
    activation.GELU,
    activation.GELU_TANH,
    activation.IDENTITY,
    normalization.LAYERNORM,
    softmax.SOFTMAX,
    attention.ATTENTION_WITHOUT_VALUE,
    attention.ATTENTION,
    block.ATTENTION_BLOCK,
    block.FFN_BLOCK,
    noci.UNIFORM_ATTENTION_GRADIENTS,
)

COMPONENTS: dict[str, ComponentLaws] = {record.name: record for record in _ALL}


def component(name: str) -> ComponentLaws:
    """The laws of one component.

    >>> component("relu").law("variance")(x_variance=1.0).round(4)
    np.float64(0.3408)

    Raises:
        DomainError: no component of that name.
    """
    if name not in COMPONENTS:
        raise domain_error("component", name, f"one of {', '.join(COMPONENTS)}")
    return COMPONENTS[name]


def components() -> tuple[str, ...]:
    """Names of every component."""
    return tuple(COMPONENTS)
