"""Types that read pictures or sound, and text towers, against the real modules of their configs.

Draws of transformers' own initialisation are stored (`python benchmarks/pictures_and_sound.py`).
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures_and_sound import CONFIGS, failures, given, names, released, shrunk

import moments
from moments.errors import DomainError, ValidityWarning
from moments.model.huggingface import OF_BLOCKS, PARTS, READERS
from moments.model.huggingface import pictures as _pictures

KINDS = sorted(_pictures.READERS)
# Queries and keys of a text whose tokens are alike at logits of variance 1, up to 25 % low
# (docs/limits.md); what is outside of its bound besides fails.
MISSES = {"siglip-base-patch16 text": r"\d+ (query|key)"}


def quiet(config: Any, **options: Any) -> moments.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return moments.from_huggingface(config, **options)


def declared(config: Any) -> tuple[moments.Transformer, str]:
    """The declaration, and all that is said of what it leaves out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = moments.from_huggingface(config)
    return model, "; ".join(str(one.message) for one in caught)


@pytest.mark.parametrize("name", names())
def test_moments_and_gradients_are_those_of_the_module(name: str) -> None:
    known = MISSES.get(name.removesuffix(" 16"), "none")
    misses = failures(name)
    assert [one for one in misses if not re.match(known, one)] == []
    for value, true in (re.findall(r"[\d.e+-]+", one.partition(": ")[2])[:2] for one in misses):
        assert 0.75 * float(true) < float(value) < float(true)


# --- configs --------------------------------------------------------------------------------------

SIZES = {  # tokens, features, layers, heads and hidden features as published
    "deit-base-distilled": (198, 768, 12, 12, 3072),
    "beit-base": (197, 768, 12, 12, 3072),
    "ijepa-vith14": (256, 1280, 32, 16, 5120),
    "dinov2-base": (1370, 768, 12, 12, 3072),
    "dinov2-giant": (1370, 1536, 40, 24, 4096),
    "ast-audioset": (1214, 768, 12, 12, 3072),
    "clip-vit-base-patch32 text": (77, 512, 12, 8, 2048),
    "clip-vit-base-patch32 vision": (50, 768, 12, 12, 3072),
    "siglip-base-patch16 vision": (196, 768, 12, 12, 3072),
    "whisper-tiny": (448, 384, 4, 6, 1536),
    "wav2vec2-base": (1500, 768, 12, 12, 3072),
    "hubert-large": (1500, 1024, 24, 16, 4096),
}


@pytest.mark.parametrize("name", SIZES)
def test_released_configs_have_their_published_sizes(name: str) -> None:
    model = quiet(released(name))
    assert (model.seq_len, model.d_model, model.layers, model.heads, model.d_ff) == SIZES[name]
    assert model == moments.Transformer.from_dict(json.loads(json.dumps(model.to_dict())))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_entry_means_what_the_class_means(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert kind in OF_BLOCKS
    assert quiet({"model_type": kind}) == quiet(transformers.AutoConfig.for_model(kind))
    _, said = declared({"model_type": kind, "spectral_gate": 3})
    assert "spectral_gate = 3 is not modelled: no entry of" in said


SECOND: dict[str, Any] = {
    "image_size": 448,
    "patch_size": 8,
    "hidden_size": 1536,
    "d_model": 768,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "conv_dim": [256] * 7,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "num_labels": 5,
    "max_length": 512,
    "mask_feature_prob": 0.1,
    "pad_token_id": 7,
    "num_channels": 1,
    "adapter_attn_dim": 16,
    "num_register_tokens": 4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_that_is_read_changes_the_declaration_or_is_named(kind: str) -> None:
    family, first = READERS[kind], declared({"model_type": kind})
    for entry in sorted(family.entries({"model_type": kind})):
        usual = family.defaults.get(entry)
        if family.usual.get(entry) is ... or (usual is None and entry not in SECOND):
            continue
        other = SECOND.get(entry, usual)
        if other == usual:
            other = not usual if isinstance(usual, bool) else _another(entry, usual)
        try:
            assert declared({"model_type": kind, entry: other}) != first, entry
        except DomainError as error:
            if f"{entry} = " not in str(error):
                raise


def _another(entry: str, usual: Any) -> Any:
    if isinstance(usual, str):
        return "relu"
    if isinstance(usual, int):
        return 2 * usual
    return 0.25 if usual == 0.0 else usual / 2


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_of_several_models_in_one_each_is_read_by_itself(kind: str) -> None:
    with pytest.raises(DomainError, match=r"give one of them, config\['text_config'\]"):
        moments.from_huggingface({"model_type": kind})


def test_each_tower_is_read() -> None:
    for name in ("clip-vit-base-patch32", "siglip-base-patch16"):
        whole = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
        text, vision = (quiet(whole[f"{tower}_config"]) for tower in ("text", "vision"))
        assert isinstance(text.embedding, moments.Embedding)
        assert isinstance(vision.embedding, moments.PatchEmbedding)
        assert text.causal == name.startswith("clip")
    clip = quiet(released("clip-vit-base-patch32 text"))
    assert clip.weights is not None
    assert clip.weights.query == pytest.approx(1 / (512 * 24))  # the depth divides the wrong one
    assert clip.weights.output == pytest.approx(1 / 512)


def test_what_is_left_out_is_said() -> None:
    for name, words in {
        "beit-base": ["drop_path_rate", "use_relative_position_bias"],
        "vit-mae-base": ["mask_ratio"],
        "wav2vec2-base": ["conv_dim", "mask_time_prob"],
        "wavlm-base": ["conv_dim", "layerdrop", "mask_time_prob", "num_buckets"],
        "whisper-tiny": [],
        "deit-base-distilled": [],
        "clip-vit-base-patch32 vision": [],
    }.items():
        _, said = declared(released(name))
        assert sorted(one.split(" = ")[0] for one in said.split("; ") if " = " in one) == words


@pytest.mark.parametrize(
    ("kind", "entry", "value"),
    [
        ("wav2vec2", "add_adapter", True),
        ("wav2vec2", "adapter_attn_dim", 16),
        ("dinov2", "layerscale_value", 0.0),
        ("deit", "patch_size", 15),
        ("audio-spectrogram-transformer", "time_stride", 0),
        ("clip_vision_model", "image_size", "224"),
        ("whisper", "max_source_positions", -1),
    ],
)
def test_an_entry_outside_the_model_is_refused(kind: str, entry: str, value: Any) -> None:
    with pytest.raises(DomainError, match=entry):
        quiet({"model_type": kind, entry: value})
    with pytest.raises(DomainError, match="seq_len"):
        quiet({"model_type": "deit"}, seq_len=64)


# --- what enters layer 1 --------------------------------------------------------------------------

PATCHES = moments.PatchEmbedding(
    (16, 24), 8, 0.01, stride=(4, 8), registers=2, register_variance=0.3, positions="learned"
)


def test_patches_overlap_and_stand_behind_learned_tokens() -> None:
    assert (PATCHES.grid, PATCHES.before, PATCHES.seq_len) == ((3, 3), 3, 12)
    assert moments.PatchEmbedding.from_dict(PATCHES.to_dict()) == PATCHES
    for wrong, word in (
        ({"stride": 0}, "stride"),
        ({"image_size": (16, 4)}, "patch_size"),
        ({"image_size": (1, 2, 3)}, "image_size"),
        ({"registers": 0}, "register_variance"),
        ({"positions": "rotary"}, "positions"),
        ({"positions": "none", "position_variance": 0.1}, "position_variance"),
    ):
        with pytest.raises(DomainError, match=word):
            PATCHES.replace(**wrong)
    turned = moments.Rotary(grid=(3, 3))
    with pytest.raises(DomainError, match="grid"):
        turned.replace(fraction=0.5)
    with pytest.raises(DomainError, match="multiple of 4"):
        moments.Transformer(1, 12, 2, 12, rotary=turned)
    with pytest.raises(DomainError, match="at least the 9 patches"):
        moments.predict(moments.Transformer(1, 16, 2, 8, rotary=turned))
    sound = moments.SoundEmbedding(bins=6, frames=20, variance=0.05)
    assert sound.seq_len == 10
    for changes, word in (
        ({"kernels": (3,)}, "as many"),
        ({"strides": 2}, "strides"),
        ({"positions": "learned"}, "positions"),
        ({"variance": 0.0}, "variance"),
    ):
        with pytest.raises(DomainError, match=word):
            sound.replace(**changes)
    with pytest.raises(DomainError, match=r"head\.pool"):
        moments.Transformer(2, 32, 2, 12, head=HEAD)
    with pytest.raises(DomainError, match="pool_norm"):
        moments.Head(pool_norm=True)


HEAD = moments.Head(
    tied=False,
    weight_variance=0.02,
    loss="classification",
    classes=3,
    pool="before",
    pool_norm=True,
)
SOUND = moments.SoundEmbedding(bins=6, frames=24, variance=0.05, bias_variance=0.1)
STACKS: dict[str, tuple[Any, moments.Head]] = {
    "overlapping patches": (PATCHES, HEAD),
    "places that turn": (PATCHES, HEAD.replace(pool="first", pool_norm=False)),
    "fixed positions": (
        PATCHES.replace(positions="sinusoidal"),
        HEAD.replace(pool="patches", norm=False),
    ),
    "convolutions": (SOUND, HEAD.replace(pool="mean")),
}


@pytest.mark.parametrize("name", STACKS)
def test_twins_of_what_enters_turns_and_pools(name: str) -> None:
    """Of a layer with a classifier, every moment and every parameter's gradient."""
    pytest.importorskip("torch")
    embedding, head = STACKS[name]
    model = moments.Transformer(
        1,
        64,
        4,
        embedding.seq_len,
        norm_affine=True,
        norm_epsilon=1e-5,
        embedding=embedding,
        head=head,
        rotary=moments.Rotary(base=100.0, grid=PATCHES.grid) if "turn" in name else None,
    )
    shape = (2, embedding.channels, *embedding.sides)
    read = {"pixels": np.random.default_rng(1).standard_normal(shape), "targets": np.array([0, 2])}
    p = moments.predict(model, **read)
    drawn = moments.simulate(model, seeds=32, batch=2, **read)
    for quantity, bound in (("variance", 0.02), ("grad_variance", 0.06)):
        gap = np.abs(getattr(p, quantity) / getattr(drawn, quantity) - 1)
        error = getattr(drawn, f"{quantity}_stderr") / getattr(drawn, quantity)
        assert np.all(gap < bound + 3 * error), (quantity, gap)
    known = p.weight_gradients().set_index(["layer", "weight"]).squared_norm
    for row in drawn.weight_gradient_rows:
        value, error = row["squared_norm"], row["squared_norm_stderr"]
        if value > 1e-12:
            expected = known[row["layer"], row["weight"]]
            assert abs(expected - value) < 0.1 * value + 3 * error, row
    assert len(known) == len({(r["layer"], r["weight"]) for r in drawn.weight_gradient_rows})


def test_a_blank_picture_and_a_class_token_at_zero_are_predicted() -> None:
    embedding = moments.PatchEmbedding(16, 8, 0.01)
    model = moments.Transformer(2, 32, 2, embedding.seq_len, norm_epsilon=1e-5, embedding=embedding)
    image = np.zeros((1, 3, 16, 16))
    image[..., :8] = 1.0
    p = moments.predict(model, pixels=image)
    assert p.token_variance is not None
    assert np.all(p.token_variance[0, [0, 2, 4]] == 0.0)
    assert np.all(np.isfinite(p.token_variance))
    assert np.all(p.token_variance[1:] > 0.0)


def test_stored_draws_are_small_and_of_every_config() -> None:
    from pictures_and_sound import STORE, stored

    assert set(stored()) == set(names())
    assert STORE.stat().st_size < 200_000
    assert {json.loads(f.read_text())["model_type"] for f in Path(CONFIGS).glob("*.json")} >= {
        kind for kind in KINDS if not kind.endswith(("text_model", "vision_model"))
    }
    assert shrunk("beit-base")["drop_path_rate"] == 0.0


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("dinov2-base", ""),
        ("whisper-tiny", ""),
        ("clip-vit-base-patch32 vision", "sits on query, key and value instead of"),
    ],
)
def test_checks_of_fresh_modules(name: str, found: str) -> None:
    """Nothing is wrong with those that draw as they are meant to; of CLIP its depth scale is."""
    torch = pytest.importorskip("torch")
    from moments.torch.huggingface_modules import build_module

    config = shrunk(name)
    data = {key: torch.as_tensor(value) for key, value in given(config).items()}
    data = {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
    report = moments.check(build_module(config, 0), data)
    assert ("nothing found wrong" in str(report)) == (not found)
    assert found in " ".join(str(report).split())
