"""Whisper's two stacks, and wav2vec 2.0 with its relatives."""

from __future__ import annotations

from typing import Any

from ..embedding import Embedding
from ..head import Head
from ..sound import SoundEmbedding
from ..transformer import Transformer
from ..weights import Weights
from .entries import Entries
from .family import Family

_BIASED = ("query", "value", "output", "ffn_in", "ffn_out")


def _whisper(read: Entries, seq_len: int | None) -> Transformer:
    """The decoder, whose `encoder` is the other stack: it reads a log-mel spectrogram as an image
    of one channel, through two convolutions. Keys have no bias; every epsilon is the layers' own
    default."""
    variance, dropout = read.variance("init_std"), read.number("dropout")
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if rate := read.number(name):
            read.leave_out(name, rate, "no layer is dropped")
    if read.flag("apply_spec_augment", False):
        read.leave_out("apply_spec_augment", True, "no stretch of the spectrogram is masked")
    shared: dict[str, Any] = {
        "activation": read.activation("activation_function"),
        "dropout": dropout,
        "attention_dropout": read.number("attention_dropout"),
        "activation_dropout": read.number("activation_dropout"),
        "weights": Weights.normal(variance),
        "biases": read.biases(_BIASED),
        "norm_epsilon": 1e-5,
        "norm_affine": True,
    }
    tokens = read.count("max_source_positions")
    sound = SoundEmbedding(
        bins=read("num_mel_bins"),
        frames=2 * tokens,
        variance=variance,
        bias_variance=0.0,
        dropout=dropout,
    )
    width = read("d_model")
    encoder = Transformer(
        read.layers("encoder_layers"),
        width,
        read("encoder_attention_heads"),
        tokens,
        d_ff=read("encoder_ffn_dim"),
        embedding=sound,
        head=Head(norm=True, loss=None),
        **shared,
    )
    text = Embedding(
        read("vocab_size"), variance, variance, dropout=dropout, padding_id=read.padding()
    )
    tied = read.flag("tie_word_embeddings")
    return Transformer(
        read.layers("decoder_layers"),
        width,
        read("decoder_attention_heads"),
        read.length("max_target_positions", seq_len),
        d_ff=read("decoder_ffn_dim"),
        causal=True,
        encoder=encoder,
        embedding=text,
        head=Head(tied=tied, weight_variance=None if tied else variance, loss="causal"),
        **shared,
    )


_WHISPER = (
    "scale_embedding use_weighted_layer_sum classifier_proj_size mask_time_prob mask_time_length "
    "mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks "
    "median_filter_width forced_decoder_ids alignment_heads num_hidden_layers lang_ids"
)
FAMILIES = {
    "whisper": Family(
        _whisper,
        "WhisperForConditionalGeneration",
        "sound",
        {"is_encoder_decoder": True} | dict.fromkeys(_WHISPER.split(), ...),
    ),
}
