"""One draw of the weights at finite width: how far it falls from the mean of all.

`band` is the spread of gradients, `network` what one number owes to every part's randomness;
`overlap` how tokens' realised overlaps vary, which the gradients of queries and keys need.

Imports `layers`. Start with `band`.
"""
