"""Every statement by name."""

from __future__ import annotations

from moments.formulas.law import ComponentLaws

from . import kedia_chain, noci, random_energy, sun

STACKS: dict[str, ComponentLaws] = {
    record.name: record
    for record in (
        kedia_chain.PRE_LN_CHAIN,
        kedia_chain.POST_LN_CHAIN,
        kedia_chain.DSLM_CHAIN,
        sun.CURSE_OF_DEPTH,
        noci.UNIFORM_ATTENTION_STACK,
        noci.UNIFORM_ATTENTION_JACOBIAN,
        random_energy.RANDOM_ENERGY,
    )
}
