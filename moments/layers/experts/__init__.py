"""Routed mixtures of experts.

routing   the three functions of two tokens' correlation that a router is, by quadrature or sampled
mixture   the component: experts' own law times those functions, both ways
"""
