"""A parallel layer with an output norm of its own: x + norm(attention(norm(x)) + ffn(norm(x)))."""

from torch import Tensor

from moments.engine.composition import Chain, Component, Parallel
from moments.layers.architecture import KINDS, Parts
from moments.model.placement import register_placement
from moments.simulation.network import TWINS, LayerTwin

NAME = "parallel-sandwich"


def layer(of: Parts) -> Component:
    """The layer put together from components, each of which knows what it does."""
    both = Parallel((of.blocks["attention"], of.blocks["ffn"]))
    branch = Chain((*of.norm("attention"), both, of.output_norm("ffn")))
    return Chain(of.sum("ffn", branch))


def twin(of: LayerTwin, x: Tensor) -> Tensor:
    """The same in torch, with the same sites and no formula in common."""
    z = of.norm(x, "attention.norm")
    z = of.norm(of.block(z, "attention") + of.block(z, "ffn"), "ffn.post_norm")
    skip, branch = of.scales("ffn")
    return of.watch(skip * x + branch * z, "ffn.sum")


register_placement(NAME, norm_sites=("attention.norm", "ffn.post_norm"))
KINDS[NAME], TWINS[NAME] = layer, twin
