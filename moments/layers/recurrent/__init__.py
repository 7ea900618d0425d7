"""Recurrent mixers and short convolutions.

heads      what heads compute, as functions of pre-activations
drawn      kernels of what drawn heads give, and of the gradients that they send back
exact      laws in closed form where nothing is drawn
leaf       the component of the engine
"""

from .leaf import Mixer, parallel_parts, recurrent_parts

__all__ = ["Mixer", "parallel_parts", "recurrent_parts"]
