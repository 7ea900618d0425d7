"""Routed mixtures of experts.

routing   three functions of two tokens' correlation for a router, by quadrature or by sampling
mixture   the component: the law of one expert times these functions, forward and backward
"""
