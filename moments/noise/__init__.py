"""Finite width: how far one draw of the weights deviates from the mean over draws.

`band` gives the spread of gradients and signals, `network` sums the noise of all parts, `sources`
are the loss and the decoder that send the last gradient, and `overlap` corrects the gradients of
queries and keys for the variance of tokens' overlaps.

Imports `layers`. Start with `band`.
"""
