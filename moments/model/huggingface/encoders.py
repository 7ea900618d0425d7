"""Masked language models read as variations of BERT or Llama."""

from __future__ import annotations

import math
from typing import Any

from ...errors import domain_error
from ..head import Head
from ..positions import RelativeBias, Rotary
from ..transformer import Transformer
from ..weights import Weights
from .bert import _bert, _narrow, _roberta
from .entries import FULL, SLIDING, Entries
from .family import Reader, declared, masked_head, tied_or
from .llama import _BOTH, INWARD, _biased, _decoder, _length, head_width
from .relatives import _by_type, _positions_per_layer


def cut_normal(variance: float, cut: float) -> float:
    """Variance of a normal distribution truncated at `cut` standard deviations.

    The factor is 1 - 2 a phi(a) / (2 Phi(a) - 1) at a = `cut` (Johnson, Kotz and Balakrishnan 1994,
    section 13.10.1).
    """
    inside = math.erf(cut / math.sqrt(2))
    return variance * (1 - cut * math.sqrt(2 / math.pi) * math.exp(-cut * cut / 2) / inside)


def _modernbert(read: Entries, seq_len: int | None) -> Transformer:
    """Pre-LN after a normalised embedding, gated, every third layer with full attention.

    The module has no norm before the first attention block, whose input the embedding's norm has
    normalised; so no parameter corresponds to the prediction for that norm's gain.
    """
    layers, every = read.layers("num_hidden_layers"), read.count("global_attn_every_n_layers", 3)
    kinds = read.kinds([SLIDING if n % every else FULL for n in range(layers)])
    length, reach = _length(read, seq_len), read.count("local_attention") // 2 + 1
    windows = [reach if kind == SLIDING and reach < length else None for kind in kinds]
    read.refuse("position_embedding_type", "absolute", "another kind of positions")
    cut = read.positive("initializer_cutoff_factor")
    drawn = cut_normal(read.variance(), cut)
    weights, last = Weights.normal(drawn, output_divisor=2 * layers), drawn / (2 * layers)
    head = masked_head(read, last, read.activation("classifier_activation"))
    bias = 0.0 if read.flag("classifier_bias") else None
    head = head.replace(norm=True, transform_bias_variance=bias, bias=read.flag("decoder_bias"))
    positions = _by_type(read, 160000.0, 10000.0, "local_rope_theta", "global_rope_theta")
    normed = {"norm": True, "norm_epsilon": read.number("norm_eps"), "padding_id": read.padding()}
    return declared(
        read,
        seq_len,
        length=length,
        variance=drawn,
        gated=True,
        dropout=read.number("attention_dropout"),
        attention_dropout=None,
        ffn_dropout=0.0,
        activation_dropout=read.number("mlp_dropout"),
        norm_bias=read.flag("norm_bias"),
        weights=weights.replace(distribution="truncated") if cut == 2 else weights,
        biases=read.biases(_biased(read, _BOTH)),
        window=windows if any(windows) else None,
        embedding=normed,
        head=head,
        **_positions_per_layer(positions, kinds),
    )


def _eurobert(read: Entries, seq_len: int | None) -> Transformer:
    """Llama without a causal mask; logits have a bias if the feed-forward blocks do."""
    head = Head(**tied_or(read, read.variance()), bias=read.flag("mlp_bias"), loss="masked")
    model = _decoder(read, seq_len, biased=_BOTH, head=head)
    return model.replace(causal=False)


def _mpnet(read: Entries, seq_len: int | None) -> Transformer:
    """BERT with T5's relative position bias, shared by all layers, and no segments.

    The module hard-codes the 32 buckets, their largest distance, and the padding token, after which
    position indices start.
    """
    read.expect("relative_attention_num_buckets", 32, "its module counts 32 buckets")
    read.expect("pad_token_id", 1, "its module takes token 1 for padding")
    length = read.at_most(
        read.count("max_position_embeddings") - 2, seq_len, "max_position_embeddings - 2"
    )
    model = _bert(read, seq_len, "gelu", length)
    return model.replace(
        relative_bias=RelativeBias(read.variance()),
        embedding=model.embedding.replace(padding_id=1),
    )


def _rotated(read: Entries, seq_len: int | None, **changes: Any) -> Transformer:
    """BERT with rotary positions instead of a position table."""
    model = _bert(read, seq_len, length=_length(read, seq_len))
    embedding = model.embedding.replace(position_variance=0.0)
    return model.replace(**({"embedding": embedding, "rotary": read.rotary()} | changes))


def _nomic(read: Entries, seq_len: int | None) -> Transformer:
    """Gated units and no biases in the layers."""
    return _rotated(read, seq_len, gated=True, biases=None, d_head=head_width(read))


def _gte(read: Entries, seq_len: int | None) -> Transformer:
    """Gated units with a bias only on their output, and dropout on the hidden features."""
    biases, dropout = (
        read.biases((*INWARD, "output", "ffn_out")),
        read.number("hidden_dropout_prob"),
    )
    return _rotated(read, seq_len, gated=True, biases=biases, activation_dropout=dropout)


def _roformer(read: Entries, seq_len: int | None) -> Transformer:
    """BERT with rotary positions; token tables may be narrower than the stream, as in ELECTRA."""
    read.refuse("rotary_value", False, "rotated values")
    width = read.count("embedding_size", read.count("hidden_size"))
    length = read.length("max_position_embeddings", seq_len)  # the module tabulates the sines
    model = _rotated(read, length, rotary=Rotary())
    return model if width == model.d_model else _narrow(read, model, width)


def _albert(read: Entries, seq_len: int | None) -> Transformer:
    """One layer's weights shared by all layers, narrower tables, no dropout on the feed-forward
    output."""
    read.refuse("num_hidden_groups", 1, "layers that share their weights in groups")
    read.refuse("inner_group_num", 1, "layers that share their weights in groups")
    model = _narrow(read, _bert(read, seq_len), read.count("embedding_size"))
    return model.replace(shared_layers=True, ffn_dropout=0.0)


def _rembert(read: Entries, seq_len: int | None) -> Transformer:
    """Narrower token tables, and an untied head with another factor width."""
    if read.flag("tie_word_embeddings"):
        raise domain_error(
            "tie_word_embeddings", True, "False: tables of input and output differ in width"
        )
    model = _narrow(read, _bert(read, seq_len), read.count("input_embedding_size"))
    head = model.head.replace(factor_dim=read.count("output_embedding_size"))
    return model.replace(head=head)


def _pre(model: Transformer, **embedding: Any) -> Transformer:
    """Change a Post-LN model to Pre-LN, with a norm before the head."""
    return model.replace(
        norm="pre",
        embedding=model.embedding.replace(**embedding),
        head=model.head.replace(norm=True),
    )


def _megatron(read: Entries, seq_len: int | None) -> Transformer:
    return _pre(_bert(read, seq_len), norm=False, norm_epsilon=0.0)


def _prelayernorm(read: Entries, seq_len: int | None) -> Transformer:
    return _pre(_roberta(read, seq_len))


def _xlm_roberta_xl(read: Entries, seq_len: int | None) -> Transformer:
    """Pre-LN RoBERTa without dropout on the feed-forward output."""
    model = _pre(_roberta(read, seq_len), norm=False, norm_epsilon=0.0)
    return model.replace(ffn_dropout=0.0)


READERS: dict[str, Reader] = {
    "albert": _albert,
    "data2vec-text": _roberta,
    "eurobert": _eurobert,
    "gte": _gte,
    "jina_embeddings_v3": _rotated,
    "megatron-bert": _megatron,
    "modernbert": _modernbert,
    "mpnet": _mpnet,
    "nomic_bert": _nomic,
    "rembert": _rembert,
    "roberta-prelayernorm": _prelayernorm,
    "roformer": _roformer,
    "xlm-roberta-xl": _xlm_roberta_xl,
}
