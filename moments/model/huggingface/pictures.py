"""Image encoders other than ViT, audio models, and text towers trained with image encoders.

Types without a loss end before their last norm: `predict` takes the gradient at the last layer's
output.
"""

from __future__ import annotations

import math
from typing import Any

from ..head import Head
from ..patches import SoundEmbedding
from ..positions import RelativeBias, Rotary
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import Entries
from .family import Reader, declared, tied_or
from .t5 import stack
from .vit import classifier, encoder, patches


def _deit(read: Entries, seq_len: int | None) -> Transformer:
    """Zero class token, distillation token (DeiT) and positions; the class token classifies."""
    variance, dropout = read.variance(), read.number("hidden_dropout_prob")
    two = int(read.kind == "deit")
    embedding = patches(read, variance, registers=two, positions="learned", dropout=dropout)
    return encoder(read, seq_len, embedding, variance, head=classifier(read, variance))


def _beit(read: Entries, seq_len: int | None) -> Transformer:
    """Gains on every branch, no bias on keys; classifies from the normalised mean of patches."""
    variance, dropout = read.variance(), read.number("hidden_dropout_prob")
    for name in ("use_relative_position_bias", "use_shared_relative_position_bias"):
        if read.flag(name):
            read.leave_out(name, True, "biases of logits start at zero, and have no gradients here")
    read.without("drop_path_rate", "no branch is dropped whole")
    absolute = read.flag("use_absolute_position_embeddings")
    embedding = patches(
        read, variance, positions="learned" if absolute else "none", dropout=dropout
    )
    scale, mean = read.number("layer_scale_init_value"), read.flag("use_mean_pooling")
    return encoder(
        read,
        seq_len,
        embedding,
        variance,
        biases=read.biases(("query", "value", "output", "ffn_in", "ffn_out")),
        layer_scale=scale > 0,
        branch_scale=scale if scale > 0 else 1.0,
        head=classifier(
            read, variance, "patches" if mean else "first", norm=not mean, pool_norm=mean
        ),
    )


def _ijepa(read: Entries, seq_len: int | None) -> Transformer:
    """No class token; classifies from the mean of all patches."""
    variance, dropout = read.variance(), read.number("hidden_dropout_prob")
    embedding = patches(
        read, variance, class_token=False, position_variance=variance, dropout=dropout
    )
    return encoder(read, seq_len, embedding, variance, head=classifier(read, variance, "mean"))


def _vit_mae(read: Entries, seq_len: int | None) -> Transformer:
    """The encoder on all patches, as in fine-tuning; positions are fixed.

    Initialised by the rule in its class; transformers 5 does not apply that rule, so a new module
    there has zero positions and a zero class token.
    """
    read.without("mask_ratio", "the encoder reads all patches, and has no decoder")
    variance, width = read.variance(), read.count("hidden_size")
    fan_in = read.count("num_channels") * read.count("patch_size") ** 2
    embedding = patches(read, 2 / (fan_in + width), class_variance=variance, positions="sinusoidal")
    return encoder(read, seq_len, embedding, variance)


def _dinov2(read: Entries, seq_len: int | None) -> Transformer:
    """ViT with a gain on every branch, optionally gated."""
    read.without("drop_path_rate", "no branch is dropped whole")
    variance, dropout = read.variance(), read.number("hidden_dropout_prob")
    embedding = patches(
        read, variance, position_variance=variance, class_variance=variance, dropout=dropout
    )
    hidden, gated = int(read.count("hidden_size") * read("mlp_ratio")), read.flag("use_swiglu_ffn")
    biased: tuple[str, ...] = ("query", "key", "value") if read.flag("qkv_bias") else ()
    biased += ("output", "ffn_in", "ffn_out") + (("gate",) if gated else ())
    return encoder(
        read,
        seq_len,
        embedding,
        variance,
        d_ff=(int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden,
        activation="silu" if gated else read.activation("hidden_act"),
        gated=gated,
        dropout=0.0,
        attention_dropout=read.number("attention_probs_dropout_prob"),
        biases=read.biases(biased),
        layer_scale=True,
        branch_scale=read.positive("layerscale_value"),
    )


def _dinov3(read: Entries, seq_len: int | None) -> Transformer:
    """Register tokens after the class token; two-dimensional rotary positions, no table."""
    read.without("drop_path_rate", "no branch is dropped whole")
    for name in ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"):
        if (value := read(name, None)) is not None:
            read.leave_out(name, value, "places are those of evaluation")
    variance, gated = read.variance(), read.flag("use_gated_mlp")
    registers = read("num_register_tokens")
    embedding = patches(
        read,
        variance,
        class_variance=variance,
        registers=registers,
        register_variance=variance if registers else 0.0,
    )
    biases = {"query": "query_bias", "key": "key_bias", "value": "value_bias"}
    biases |= {"output": "proj_bias"}
    biases |= dict.fromkeys(("ffn_in", "ffn_out", *(("gate",) if gated else ())), "mlp_bias")
    biased = tuple(matrix for matrix, name in biases.items() if read.flag(name))
    return encoder(
        read,
        seq_len,
        embedding,
        variance,
        gated=gated,
        attention_dropout=read.number("attention_dropout"),
        biases=read.biases(biased),
        rotary=Rotary(base=read.positive("rope_theta"), grid=embedding.grid),
        layer_scale=True,
        branch_scale=read.positive("layerscale_value"),
    )


def _spectrogram(read: Entries, seq_len: int | None) -> Transformer:
    """Overlapping patches of a spectrogram (mel bins by time), zero positions, and two zero tokens
    before the patches, from whose mean a normalised classifier reads."""
    variance, dropout = read.variance(), read.number("hidden_dropout_prob")
    embedding = patches(
        read,
        variance,
        image_size=(read.count("num_mel_bins"), read.count("max_length")),
        stride=(read.count("frequency_stride"), read.count("time_stride")),
        channels=1,
        registers=1,
        positions="learned",
        dropout=dropout,
    )
    head = classifier(read, variance, "before", pool_norm=True)
    return encoder(read, seq_len, embedding, variance, head=head)


# --- towers ---------------------------------------------------------------------------------------


def _clip_weights(read: Entries) -> Weights:
    """Variances by width and depth; depth divides query, key and value, not output as in GPT-2."""
    width, depth = read.count("hidden_size"), 2 * read.layers("num_hidden_layers")
    factor = read.variance("initializer_factor")
    inward = factor / (width * depth)
    return Weights(inward, inward, inward, factor / width, factor / (2 * width), inward)


def _clip_vision(read: Entries, seq_len: int | None) -> Transformer:
    """A norm on the embedding (patches, class token and positions) before layer 1."""
    factor = read.variance("initializer_factor")
    variance = read.variance() * factor
    embedding = patches(
        read,
        variance,
        bias_variance=None,
        position_variance=variance,
        class_variance=factor / read.count("hidden_size"),
        norm=True,
        norm_epsilon=read.number("layer_norm_eps"),
    )
    return _tower(read, seq_len, embedding, _clip_weights(read), Biases())


def _siglip_weights(read: Entries) -> tuple[Weights, Biases]:
    width, hidden = read.count("hidden_size"), read.count("intermediate_size")
    ffn = 2 / (width + hidden)
    square = 1 / width
    weights = Weights(square, square, square, square, ffn, ffn, distribution="uniform")
    return weights, Biases(ffn_in=1e-12, ffn_out=1e-12)  # standard deviation 1e-6


def _siglip_vision(read: Entries, seq_len: int | None) -> Transformer:
    """No class token; the block that pools the patches by attention is not modelled.

    The patch projection is a LeCun normal whose variance is corrected for truncation at two
    standard deviations; the module truncates at the value 2 instead, which has no effect.
    """
    if read.flag("vision_use_head"):
        read.leave_out("vision_use_head", True, "the declaration ends below the last norm")
    fan_in = read.count("num_channels") * read.count("patch_size") ** 2
    inside, density = math.erf(math.sqrt(2)), math.exp(-2) / math.sqrt(2 * math.pi)
    variance = 1 / (fan_in * (1 - 4 * density / inside))
    position = 1 / read.count("hidden_size")
    embedding = patches(read, variance, class_token=False, position_variance=position)
    return _tower(read, seq_len, embedding, *_siglip_weights(read))


def _tower(
    read: Entries, seq_len: int | None, embedding: Any, weights: Weights, biases: Biases
) -> Transformer:
    dropout = read.number("attention_dropout")
    return encoder(
        read, seq_len, embedding, weights=weights, biases=biases, attention_dropout=dropout
    )


def _text(read: Entries, seq_len: int | None, variance: float, **fields: Any) -> Transformer:
    """A Pre-LN stack; token rows and learned positions have the same variance."""
    positions = {"position_variance": variance}
    return declared(read, seq_len, variance=variance, embedding=positions, head=None, **fields)


def _clip_text(read: Entries, seq_len: int | None) -> Transformer:
    variance = 4e-4 * read.variance("initializer_factor")  # deviation .02, not initializer_range
    weights = _clip_weights(read)
    return _text(read, seq_len, variance, weights=weights, biases=Biases(), causal=True)


def _siglip_text(read: Entries, seq_len: int | None) -> Transformer:
    """Not causal; the projection after the last norm is not modelled."""
    weights, biases = _siglip_weights(read)
    variance = 1 / read.count("hidden_size")
    return _text(read, seq_len, variance, weights=weights, biases=biases)


# --- sound ----------------------------------------------------------------------------------------

_BIASED = ("query", "value", "output", "ffn_in", "ffn_out")


def _whisper(read: Entries, seq_len: int | None) -> Transformer:
    """The decoder, with the encoder as its `encoder`, which reads a log-mel spectrogram through two
    convolutions. Keys have no bias; norms have torch's default epsilon."""
    variance, dropout = read.variance("init_std"), read.number("dropout")
    if read.flag("apply_spec_augment", False):
        read.leave_out("apply_spec_augment", True, "no stretch of the spectrogram is masked")
    tokens = read.count("max_source_positions")
    sound = SoundEmbedding(
        bins=read("num_mel_bins"),
        frames=2 * tokens,
        variance=variance,
        bias_variance=0.0,
        dropout=dropout,
    )
    length = read.length("max_target_positions", seq_len)
    fields: dict[str, Any] = {"norm": "pre", "biases": read.biases(_BIASED)}
    head = Head(loss=None)
    encoder = stack(read, "encoder", length=tokens, head=head, embedding=sound, **fields)
    fields["head"] = Head(**tied_or(read, variance), loss="causal")
    text = {"position_variance": variance, "dropout": dropout, "padding_id": read.padding()}
    fields |= {"causal": True, "encoder": encoder, "embedding": text}
    return stack(read, "decoder", length=length, **fields)


def _wav2vec2(read: Entries, seq_len: int | None) -> Transformer:
    """The layers after the convolutions over a waveform; `predict` takes the moments of the
    convolutions' output (variance 1 if layers are Post-LN, as a norm precedes layer 1)."""
    front = "what enters layer 1 is given to predict, as variance and correlation or as kernel"
    read.leave_out("conv_dim", read("conv_dim"), front)
    read.without("layerdrop", "no layer is dropped")
    if read.flag("apply_spec_augment"):
        for name in ("mask_time_prob", "mask_feature_prob"):
            read.without(name, "nothing that enters is masked")
    read.refuse("add_adapter", False, "a stack of convolutions behind the last layer")
    read.refuse("adapter_attn_dim", None, "a third block in every layer")
    return declared(
        read,
        seq_len,
        length=1500 if seq_len is None else seq_len,
        norm="pre" if read.flag("do_stable_layer_norm") else "post",
        activation_dropout=read.number("activation_dropout"),
        embedding=None,
        head=None,
    )


def _wavlm(read: Entries, seq_len: int | None) -> Transformer:
    """Relative position biases, gated by functions of a token's features.

    The gate is a (b c - 1) + 2, with sigmoids a and b that start near 1/2 and c that starts at 1.
    Approximation: it is the constant 7/4, its value at a = b = 1/2.
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


READERS: dict[str, Reader] = {
    "deit": _deit,
    "vit_msn": _deit,
    "beit": _beit,
    "data2vec-vision": _beit,
    "ijepa": _ijepa,
    "vit_mae": _vit_mae,
    "dinov2": _dinov2,
    "dinov3_vit": _dinov3,
    "audio-spectrogram-transformer": _spectrogram,
    "clip_vision_model": _clip_vision,
    "clip_text_model": _clip_text,
    "siglip_vision_model": _siglip_vision,
    "siglip_text_model": _siglip_text,
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "hubert": _wav2vec2,
    "wavlm": _wavlm,
}
