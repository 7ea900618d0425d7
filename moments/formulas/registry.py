"""Every component by name, so that a user can ask for a formula and a test can walk them all."""

from __future__ import annotations

from typing import Any

from ..errors import DomainError, unknown_name
from . import (
    attention,
    block,
    embedding,
    gated,
    head,
    kedia_chain,
    linear,
    noci,
    normalization,
    random_energy,
    softmax,
    sun,
)
from .law import ComponentLaws
from .named_activations import (
    ACTIVATION_LAWS,
    activation_laws,
    activation_names,
    leaky_slope,
    register_activation,
    registered_function,
)

_ALL = (
    embedding.TOKEN_EMBEDDING,
    embedding.SEGMENT_EMBEDDING,
    embedding.POSITION_EMBEDDING,
    linear.LINEAR,
    linear.BIASED_LINEAR,
    linear.DROPOUT,
    linear.SCALE,
    *ACTIVATION_LAWS.values(),
    gated.SWIGLU,
    gated.GEGLU,
    gated.GEGLU_TANH,
    gated.REGLU,
    gated.GLU,
    gated.BILINEAR,
    normalization.LAYERNORM,
    normalization.RMSNORM,
    normalization.DYT,
    softmax.SOFTMAX,
    attention.ATTENTION_WITHOUT_VALUE,
    attention.ATTENTION,
    block.ATTENTION_BLOCK,
    block.FFN_BLOCK,
    head.CROSS_ENTROPY,
    noci.UNIFORM_ATTENTION_GRADIENTS,
)

COMPONENTS: dict[str, ComponentLaws] = {record.name: record for record in _ALL}

# Statements about whole networks, which no component of a network is.
STACKS: dict[str, ComponentLaws] = {
    record.name: record
    for record in (
        kedia_chain.PRE_LN_CHAIN,
        kedia_chain.POST_LN_CHAIN,
        kedia_chain.DSLM_CHAIN,
        kedia_chain.CORRELATED_RESIDUAL,
        sun.CURSE_OF_DEPTH,
        noci.UNIFORM_ATTENTION_STACK,
        noci.UNIFORM_ATTENTION_JACOBIAN,
        random_energy.RANDOM_ENERGY,
    )
}


def component(name: str) -> ComponentLaws:
    """The laws of one component.

    >>> component("relu").law("variance")(x_variance=1.0).round(4)
    np.float64(0.3408)

    Raises:
        DomainError: no component of that name.
    """
    for known in (COMPONENTS, STACKS):
        if name in known:
            return known[name]
    if name in activation_names() or leaky_slope(name) is not None:
        return activation_laws(name)
    raise unknown_name("component", name, components())


def components() -> tuple[str, ...]:
    """Names of every component, registered activations included."""
    registered = (name for name in activation_names() if name not in COMPONENTS)
    return (*COMPONENTS, *registered)


def recipe(laws: ComponentLaws) -> tuple[Any, ...]:
    """What `found_again` needs: a name, and the functions of an activation of the user's.

    Raises:
        DomainError: laws that no name leads to.
    """
    own = registered_function(laws.name)
    found = (laws.name, *(own or ()))
    if found_again(*found) is not laws:
        raise DomainError(f"the laws {laws.name!r} cannot be found again by name")
    return found


def found_again(name: str, *functions: Any) -> ComponentLaws:
    """The laws of a name; an activation of the user's is registered where it is not yet."""
    if functions and registered_function(name) is None:
        return register_activation(name, *functions)
    return component(name)
