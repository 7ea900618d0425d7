"""Whisper's two stacks, and wav2vec 2.0 with its relatives."""

from __future__ import annotations

from typing import Any

from ..embedding import Embedding
from ..head import Head
from ..positions import RelativeBias
from ..sound import SoundEmbedding
from ..transformer import Transformer
from ..weights import Biases, Weights
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


def _wav2vec2(read: Entries, seq_len: int | None) -> Transformer:
    """The stack behind the convolutions over a waveform, whose output's moments are given to
    `predict`: of variance 1 where layers are Post-LN, as a norm precedes layer 1."""
    front = "what enters layer 1 is given to predict, as variance and correlation or as kernel"
    read.leave_out("conv_dim", read("conv_dim"), front)
    if rate := read.number("layerdrop"):
        read.leave_out("layerdrop", rate, "no layer is dropped")
    if read.flag("apply_spec_augment"):
        for name in ("mask_time_prob", "mask_feature_prob"):
            if rate := read.number(name):
                read.leave_out(name, rate, "nothing that enters is masked")
    read.refuse("add_adapter", False, "a stack of convolutions behind the last layer")
    read.refuse("adapter_attn_dim", None, "a third block in every layer")
    return Transformer(
        read.layers("num_hidden_layers"),
        read("hidden_size"),
        read("num_attention_heads"),
        1500 if seq_len is None else seq_len,
        d_ff=read("intermediate_size"),
        norm="pre" if read.flag("do_stable_layer_norm") else "post",
        activation=read.activation("hidden_act"),
        dropout=read.number("hidden_dropout"),
        attention_dropout=read.number("attention_dropout"),
        activation_dropout=read.number("activation_dropout"),
        weights=Weights.normal(read.variance()),
        biases=Biases(),
        norm_epsilon=read.number("layer_norm_eps"),
        norm_affine=True,
    )


def _wavlm(read: Entries, seq_len: int | None) -> Transformer:
    """Biases of logits by relative position, gated by what a token's features are.

    A gate is a (b c - 1) + 2 with sigmoids a and b that start near 1/2 and c at 1.
    """
    read.leave_out(
        "num_buckets",
        read("num_buckets"),
        "gates on biases by relative position are 7/4 here, the mean where they start; gradients "
        "of the biases' table are 49/16 of those of relative_bias",
    )
    variance = (7 / 4) ** 2 * read.variance()
    bias = RelativeBias(variance, read("num_buckets"), read("max_bucket_distance"))
    return _wav2vec2(read, seq_len).replace(relative_bias=bias)


_WHISPER = (
    "scale_embedding use_weighted_layer_sum classifier_proj_size mask_time_prob mask_time_length "
    "mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks "
    "median_filter_width forced_decoder_ids alignment_heads num_hidden_layers lang_ids"
)
# Of the convolutions, of masking, of losses and of other tasks
_FRONT = (
    "adapter_kernel_size adapter_stride classifier_proj_size codevector_dim contrastive_logits_"
    "temperature conv_bias conv_kernel conv_pos_batch_norm conv_stride ctc_loss_reduction "
    "ctc_zero_infinity diversity_loss_weight feat_extract_activation feat_extract_norm "
    "feat_proj_dropout feat_proj_layer_norm feat_quantizer_dropout final_dropout "
    "freeze_feat_extract_train mask_feature_length mask_feature_min_masks mask_feature_prob "
    "mask_time_length mask_time_min_masks mask_time_prob no_mask_channel_overlap "
    "no_mask_time_overlap num_adapter_layers num_codevector_groups num_codevectors_per_group "
    "num_conv_pos_embedding_groups num_conv_pos_embeddings num_ctc_classes num_feat_extract_layers "
    "num_negatives output_hidden_size proj_codevector_dim tdnn_dilation tdnn_dim tdnn_kernel "
    "use_weighted_layer_sum vocab_size xvector_output_dim"
)
FAMILIES = {
    "whisper": Family(
        _whisper,
        "WhisperForConditionalGeneration",
        "sound",
        {"is_encoder_decoder": True} | dict.fromkeys(_WHISPER.split(), ...),
    ),
    "wav2vec2": Family(_wav2vec2, "Wav2Vec2Model", "sound", dict.fromkeys(_FRONT.split(), ...)),
    "hubert": Family(_wav2vec2, "HubertModel", "sound", dict.fromkeys(_FRONT.split(), ...)),
    "wavlm": Family(_wavlm, "WavLMModel", "sound", dict.fromkeys(_FRONT.split(), ...)),
}
