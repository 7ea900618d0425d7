"""Recurrent mixers and short convolutions.

heads      heads as functions of their pre-activations
drawn      kernels of outputs and gradients, averaged over sampled heads
exact      mixers with laws in closed form
leaf       the component of the engine
"""

from .leaf import Mixer, parallel_parts, recurrent_parts

__all__ = ["Mixer", "parallel_parts", "recurrent_parts"]
