"""Model families of Hugging Face: how a config is read.

entries          reading a config and naming what is left unread
family, sizes    what a family is, with the heads that most share; its architecture at another size
families.json    by the file that reads them, of every type its class in transformers, entries that
                 are ignored, with a reason "why", and the "usual" values at which others change
                 nothing; both as of a type that it is "like"; whether the class draws otherwise
                 than its authors ("slip")
defaults.json    what entries that are left out mean, from the config classes themselves
                 (`python benchmarks/config_options.py defaults --kinds KIND`)
bert, gpt, parallel, llama, t5, vit: one group of families each
relatives, encoders: dense types, of which a module is read by what it computes
latent, moe, recurrent, hybrid: families whose blocks `moments.torch` does not know in a module
newer            types that are one of these with another block or pattern
pictures         what they read enters through patches or convolutions
"""

from __future__ import annotations

from .family import SECTIONS, Family

__all__ = ["DENSE", "FAMILIES", "NEAREST", "OF_BLOCKS", "READERS", "REFUSED", "Family"]


def _of(section: str) -> dict[str, Family]:
    return {
        kind: Family.of(kind, file) for file, kinds in SECTIONS[section].items() for kind in kinds
    }


FAMILIES = _of("families")
"""`model_type` -> family."""
DENSE = _of("dense")
"""The same of those whose modules `moments.torch.from_config` reads."""
OF_BLOCKS = _of("blocks")
"""The same of those that are read from their config alone: of a module of theirs `moments.torch`
does not know every part."""
READERS = FAMILIES | DENSE | OF_BLOCKS

_BEYOND = {
    "sparse attention": "big_bird led longformer longt5",
    "several models in one": "clip siglip",
    "convolutions": "convnext",
    "logits of relative positions": "deberta",
    "queries, keys and values that are clipped": "dbrx",
    "experts drawn at random among near ties": "phimoe",
    "experts that drop tokens": "switch_transformers",
    "norms before the blocks of some layers and behind those of others": "olmo_hybrid",
    "a block whose weights several layers share": "zamba",
    "a stack that pools its tokens": "funnel",
    "attention to compressed keys that are values too": "deepseek_v4",
    "attention to tokens that an index chooses": "hy_v4",
    "residual streams with coefficients per feature": "qwen4_exp qwen4_exp_text",
    "bottlenecks around every block": "mobilebert",
    "a recurrent layer": "rwkv",
    "hashed attention": "reformer",
    "windows of patches that shift between layers": "swin",
    "attention of two streams": "xlnet",
}
PARTS = {
    kind: names.split()
    for kind, names in {
        "clip": "text_config vision_config",
        "siglip": "text_config vision_config",
    }.items()
}
"""Types of several models in one -> the entries whose objects are configs that are read."""
REFUSED = {kind: feature for feature, kinds in _BEYOND.items() for kind in kinds.split()}
"""Known model types, and the feature that no Transformer can express."""

_RELATIVES = {
    "bert": "deberta layoutlm",
    "gpt2": "gpt-sw3",
    "t5": "longt5",
    "vit": "dinov2_with_registers yolos",
}
NEAREST = {kind: family for family, kinds in _RELATIVES.items() for kind in kinds.split()}
"""Model types that are not read -> the family here that is built most like them."""
