"""Modules of public libraries: every submodule's output predicted by operations, and measured.

    pip install --no-deps timm x-transformers vit-pytorch ...    # any of LIBRARIES; none is needed
    python benchmarks/library_modules.py run [NAME ...]          # prints and stores a row for each
    python benchmarks/library_modules.py table                   # writes what is stored

Modules have the settings of their authors at width 48 to 64, 2 or 3 layers and 12 to 64 places.
What is measured are hooks on submodules over fresh draws, in training mode where there are batch
norms: the mean square of the output, its mean product over pairs of tokens, the mean square of its
gradient, and squared gradients of parameters; of the next token's cross-entropy if the module gives
logits, else of an independent gradient at its output. Predictions are for one draw.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tables
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import moments

DATA = Path(__file__).parent / "data" / "library_modules.json"
DRAWS, SECONDS, WORDS = 48, 200, 256

_RANDOM = torch.Generator().manual_seed(0)
IDS = torch.randint(0, WORDS, (1, 16), generator=_RANDOM)
MORE_IDS = torch.randint(0, WORDS, (1, 32), generator=_RANDOM)
PICTURE = torch.randn(1, 3, 32, 32, generator=_RANDOM)
LARGER = torch.randn(1, 3, 64, 64, generator=_RANDOM)
FEATURES = torch.randn(1, 16, 64, generator=_RANDOM)
LATENT = torch.randn(1, 4, 8, 8, generator=_RANDOM)
SERIES = torch.randn(1, 24, 12, generator=_RANDOM)
CHANNELS_LAST = torch.randn(1, 8, 8, 3, generator=_RANDOM)
SMALL = {"num_tokens": WORDS, "dim": 64, "depth": 2}
HEADS = {"heads": 4, "dim_head": 16}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 4}
VIT |= {"num_classes": 10}
OTHER_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 64, "mlp_dim": 128}
OTHER_VIT |= HEADS
SWIN = {"embed_dim": 48, "num_heads": [3, 6], "depths": [2, 2], "num_classes": 10}


def of(path: str, name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module(path), name)(**settings)


def timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: importlib.import_module("timm").create_model(name, **(VIT | settings))


def vit(file: str, name: str = "ViT", **settings: Any) -> Callable[[], nn.Module]:
    return of(f"vit_pytorch.{file}", name, **(OTHER_VIT | {"depth": 3} | settings))


def decoder(wrapped: dict[str, Any] | None = None, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        x = importlib.import_module("x_transformers")
        layers = x.Decoder(**({"dim": 64, "depth": 3, "heads": 4, "attn_dim_head": 16} | settings))
        size = {"num_tokens": WORDS, "max_seq_len": 64}
        return x.TransformerWrapper(**size, attn_layers=layers, **(wrapped or {}))

    return make


def litgpt(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = importlib.import_module("litgpt")
        size = {"block_size": 64, "vocab_size": WORDS, "padded_vocab_size": WORDS}
        size |= {"n_layer": 2, "n_head": 4, "n_embd": 64}
        return library.GPT(library.Config(**(size | settings)))

    return make


LLAMA = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False}
LLAMA |= {"norm_class_name": "RMSNorm", "intermediate_size": 192, "n_query_groups": 2}
GEMMA = LLAMA | {"scale_embeddings": True, "attention_scores_scalar": 16, "head_size": 32}
GEMMA |= {"mlp_class_name": "GemmaMLP", "post_attention_norm": True, "post_mlp_norm": True}
GEMMA |= {"attention_logit_softcapping": 50.0, "sliding_window_size": 8}
GEMMA |= {"sliding_window_indices": [0, 1], "final_logit_softcapping": 30.0}
TUNE = {"vocab_size": WORDS, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64}
TUNE |= {"max_seq_len": 64, "intermediate_dim": 192}


class Translator(nn.Module):
    """An encoder and a decoder that reads it."""

    def __init__(self) -> None:
        super().__init__()
        x = importlib.import_module("x_transformers")
        size = {"dim": 64, "depth": 2, "heads": 4, "attn_dim_head": 16}
        words = {"num_tokens": WORDS, "max_seq_len": 64}
        self.encoder = x.TransformerWrapper(**words, attn_layers=x.Encoder(**size))
        layers = x.Decoder(**size, cross_attend=True)
        self.decoder = x.TransformerWrapper(**words, attn_layers=layers)

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        return self.decoder(ids, context=self.encoder(source, return_embeddings=True))


def clip() -> nn.Module:
    library = importlib.import_module("open_clip.model")
    picture = library.CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=8, image_size=32)
    text = library.CLIPTextCfg(context_length=16, vocab_size=WORDS, width=64, heads=4, layers=2)
    return library.CLIP(embed_dim=64, vision_cfg=picture, text_cfg=text)


DIT = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2}
DIT |= {"sample_size": 8, "patch_size": 2}
ROUTED = {"num_memory_tokens": 4, "seq_len": 16}

MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "timm: ViT": (timm("vit_tiny_patch16_224"), PICTURE),
    "timm: DeiT III": (timm("deit3_small_patch16_224"), PICTURE),
    "timm: SigLIP": (timm("vit_base_patch16_siglip_224"), PICTURE),
    "timm: BEiT": (timm("beit_base_patch16_224"), PICTURE),
    "timm: EVA-02": (timm("eva02_tiny_patch14_224"), PICTURE),
    "timm: CaiT": (timm("cait_xxs24_224"), PICTURE),
    "timm: XCiT": (of("timm.models.xcit", "Xcit", **(VIT | {"img_size": 64, "patch_size": 16,
                                                            "depth": 2})), LARGER),
    "timm: Swin": (of("timm.models.swin_transformer", "SwinTransformer", img_size=32,
                      window_size=4, **SWIN), PICTURE),
    "timm: MLP-Mixer": (of("timm.models.mlp_mixer", "MlpMixer", num_classes=10, img_size=32,
                           patch_size=8, num_blocks=3, embed_dim=64), PICTURE),
    "timm: ConvNeXt": (lambda: importlib.import_module("timm").create_model(
        "convnext_atto", depths=(1, 1, 1, 1), dims=(64, 64, 128, 128), num_classes=10), PICTURE),
    "torchvision: ViT": (of("torchvision.models", "VisionTransformer", image_size=32, patch_size=8,
                            num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=256, num_classes=10),
                         PICTURE),
    "vit-pytorch: ViT": (vit("vit"), PICTURE),
    "vit-pytorch: SimpleViT": (vit("simple_vit", "SimpleViT"), PICTURE),
    "vit-pytorch: nViT": (vit("normalized_vit", "nViT"), PICTURE),
    "vit-pytorch: CaiT": (vit("cait", "CaiT", depth=2, cls_depth=1), PICTURE),
    "vit-pytorch: parallel": (vit("parallel_vit"), PICTURE),
    "vit-pytorch: DeepViT": (vit("deepvit", "DeepViT"), PICTURE),
    "vit-pytorch: Keel": (vit("vit_with_keel_post_ln"), PICTURE),
    "vit-pytorch: hyper-connections": (vit("simple_vit_with_hyper_connections", "SimpleViT",
                                           depth=2, num_residual_streams=4), PICTURE),
    "vit-pytorch: U-ViT": (vit("simple_uvit", "SimpleUViT", depth=4), PICTURE),
    "vit-pytorch: norms of queries and keys": (vit("simple_vit_with_qk_norm", "SimpleViT"),
                                               PICTURE),
    "vit-pytorch: value residual": (vit("simple_vit_with_value_residual", "SimpleViT"), PICTURE),
    "x-transformers: GPT": (decoder(), IDS),
    "x-transformers: Llama": (decoder({"use_abs_pos_emb": False}, use_rmsnorm=True, ff_swish=True,
                                      ff_glu=True, ff_no_bias=True, rotary_pos_emb=True,
                                      attn_kv_heads=2), IDS),
    "x-transformers: norms of queries and keys, value residual": (
        decoder(attn_qk_norm=True, attn_qk_norm_dim_scale=True, rotary_pos_emb=True,
                add_value_residual=True, use_simple_rmsnorm=True), IDS),
    "x-transformers: T5's bias, squared ReLU": (decoder(rel_pos_bias=True, ff_relu_squared=True,
                                                        use_scalenorm=True), IDS),
    "x-transformers: sandwich, ALiBi": (decoder(sandwich_norm=True, alibi_pos_bias=True,
                                                alibi_num_heads=2), IDS),
    "x-transformers: gated residuals, macaron": (decoder(gate_residual=True, macaron=True, depth=2),
                                                 IDS),
    "x-transformers: Post-LN, residual attention": (decoder(pre_norm=False, residual_attn=True),
                                                    IDS),
    "x-transformers: memory tokens, keys and values": (decoder({"num_memory_tokens": 4},
                                                               attn_num_mem_kv=4), IDS),
    "x-transformers: weights over layers": (decoder(integrate_layers=True), IDS),
    "x-transformers: encoder, decoder": (Translator, (IDS, MORE_IDS)),
    "litgpt: Pythia": (litgpt(), IDS),
    "litgpt: Llama": (litgpt(mlp_class_name="LLaMAMLP", **LLAMA), IDS),
    "litgpt: Gemma 2": (litgpt(**GEMMA), IDS),
    "torchtune: Llama 3.1": (of("torchtune.models.llama3_1", "llama3_1", **TUNE), IDS),
    "torchtune: Gemma 2": (of("torchtune.models.gemma2", "gemma2", head_dim=16,
                              sliding_window_size=8, **TUNE), IDS),
    "torchtune: Qwen 2": (of("torchtune.models.qwen2", "qwen2", tie_word_embeddings=True, **TUNE),
                          IDS),
    "open_clip: CLIP": (clip, (PICTURE, IDS)),
    "diffusers: DiT": (of("diffusers", "DiTTransformer2DModel", out_channels=8,
                          num_embeds_ada_norm=10, **DIT),
                       (LATENT, torch.tensor([7]), torch.tensor([3]))),
    "nystrom-attention": (of("nystrom_attention", "Nystromformer", dim=64, depth=2,
                             num_landmarks=8, attn_values_residual_conv_kernel=3, **HEADS),
                          FEATURES),
    "performer": (of("performer_pytorch", "PerformerLM", max_seq_len=64, **SMALL, **HEADS), IDS),
    "linear-attention-transformer": (of("linear_attention_transformer",
                                        "LinearAttentionTransformerLM", max_seq_len=64,
                                        causal=True, **SMALL, **HEADS), IDS),
    "linformer": (of("linformer", "LinformerLM", seq_len=16, heads=4, k=8, **SMALL), IDS),
    "sinkhorn-transformer": (of("sinkhorn_transformer", "SinkhornTransformerLM", max_seq_len=16,
                                heads=4, bucket_size=4, **SMALL), IDS),
    "conformer": (of("conformer", "Conformer", dim=64, depth=2, conv_kernel_size=7, **HEADS),
                  FEATURES),
    "soft-moe": (of("soft_moe_pytorch", "SoftMoE", dim=64, seq_len=16, num_experts=4), FEATURES),
    "recurrent-memory-transformer": (of("recurrent_memory_transformer_pytorch",
                                        "RecurrentMemoryTransformer", **ROUTED, **SMALL, **HEADS),
                                     IDS),
    "g-mlp": (of("g_mlp_pytorch", "gMLP", seq_len=16, **SMALL), IDS),
    "mega": (of("mega_pytorch", "Mega", ema_heads=4, attn_dim_qk=16, attn_dim_value=64,
                laplacian_attn_fn=True, **SMALL), IDS),
    "block-recurrent-transformer": (of("block_recurrent_transformer_pytorch",
                                       "BlockRecurrentTransformer", max_seq_len=16, block_width=16,
                                       num_state_vectors=8, recurrent_layers=(2,), **SMALL,
                                       **HEADS), IDS),
    "FLASH": (of("flash_pytorch", "FLASHTransformer", group_size=8, query_key_dim=16, causal=True,
                 **SMALL), IDS),
    "h-transformer-1d": (of("h_transformer_1d", "HTransformer1D", max_seq_len=16, block_size=4,
                            **SMALL, **HEADS), IDS),
    "iTransformer": (of("iTransformer", "iTransformer", num_variates=12, lookback_len=24, depth=2,
                        dim=64, pred_length=8, **HEADS), SERIES),
    "PEER": (of("PEER_pytorch", "PEER", dim=64, heads=2, num_experts=1024, num_experts_per_head=4,
                pre_rmsnorm=True), FEATURES),
    "taylor-series-linear-attention": (of("taylor_series_linear_attention",
                                          "TaylorSeriesLinearAttn", dim=64, dim_head=8, heads=2,
                                          prenorm=True), FEATURES),
    "gateloop-transformer": (of("gateloop_transformer", "Transformer", use_gate_looped_attn=False,
                                rotary_emb=True, **SMALL, **HEADS), IDS),
    "minGRU": (of("minGRU_pytorch.minLM", "minLM", **SMALL), IDS),
    "MEGABYTE": (of("MEGABYTE_pytorch", "MEGABYTE", num_tokens=WORDS, dim=(64, 64), depth=(2, 1),
                    max_seq_len=(4, 4), **HEADS), IDS),
    "PaLM-rlhf": (of("palm_rlhf_pytorch", "PaLM", **SMALL, **HEADS), IDS),
    "perceiver": (of("perceiver_pytorch", "Perceiver", num_freq_bands=4, depth=1, max_freq=10.0,
                     num_latents=8, latent_dim=64, latent_heads=4, latent_dim_head=16,
                     cross_dim_head=16, num_classes=10, self_per_cross_attn=2), CHANNELS_LAST),
}  # fmt: skip
LIBRARIES = sorted({name.partition(":")[0] for name in MODULES})


def called(module: nn.Module, batch: Any) -> Tensor:
    """The first real tensor that a module gives."""
    output = module(*batch) if isinstance(batch, tuple) else module(batch)
    found = first(output)
    assert found is not None
    return found


def first(output: Any) -> Tensor | None:
    if not isinstance(output, Tensor | tuple | list | dict):
        output = list(getattr(output, "__dict__", {}).values())
    real = (t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.is_floating_point())
    return next(real, None)


def ids_of(output: Tensor, batch: Any) -> Tensor | None:
    """Token ids whose vocabulary the output's logits are over."""
    for ids in tree_flatten(batch)[0]:
        if not ids.is_floating_point() and output.ndim == 3 and output.shape[:2] == ids.shape:
            return ids
    return None


def scalar(output: Tensor, batch: Any) -> Tensor:
    ids = ids_of(output, batch)
    if ids is None:
        return (output * torch.randn(output.shape)).sum()
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def measured(make: Callable[[], nn.Module], batch: Any) -> tuple[Any, Any]:
    """By (path, number of the call): lists over draws of the mean square, the mean product of two
    tokens and the mean squared gradient of a submodule's output; of parameters, squared norms."""
    outputs: dict[tuple[str, int], list[list[float]]] = {}
    weights: dict[str, list[float]] = {}
    for draw in range(DRAWS):
        torch.manual_seed(1000 + draw)
        module, kept = make().eval(), []
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            module.train()
            for part in module.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
        calls: dict[str, int] = {}

        def after(path: str, calls: Any = calls, kept: Any = kept) -> Callable[..., None]:
            def hook(_: Any, __: Any, output: Any) -> None:
                x, number = first(output), calls.get(path, 0)
                if x is None:
                    return
                calls[path] = number + 1
                three = outputs.setdefault((path, number), [[], [], []])
                y = x.detach().double()
                three[0].append(float(y.square().mean()))
                if y.ndim == 3 and 1 < y.shape[1] <= y.shape[2]:  # features are last
                    gram = (y @ y.mT / y.shape[-1]).mean(0)
                    n = len(gram)
                    three[1].append(float(gram.sum() - gram.trace()) / (n * (n - 1)))
                if x.requires_grad:
                    x.retain_grad()
                    kept.append((three[2], x))

            return hook

        for path, part in module.named_modules():
            part.register_forward_hook(after(path))
        scalar(called(module, batch), batch).backward()
        for squares, x in kept:
            if x.grad is not None:
                squares.append(float(x.grad.double().square().mean()))
        for name, p in module.named_parameters():
            if p.grad is not None:
                weights.setdefault(name, []).append(float(p.grad.double().square().sum()))
    return outputs, weights


def study(name: str) -> dict[str, Any]:
    make, batch = MODULES[name]
    torch.manual_seed(0)
    module = make().eval()
    with torch.no_grad():
        ids = ids_of(called(module, batch), batch)
    began = time.process_time()
    result = moments.torch.predict(module, batch, loss=None if ids is None else "cross-entropy")
    seconds = time.process_time() - began
    outputs, weights = measured(make, batch)
    errors: dict[str, list[float]] = {"variances": [], "correlations": [], "gradients": []}
    calls: dict[str, int] = {}
    total = sum(len(three[0]) == DRAWS for three in outputs.values())
    for row in result.outputs:
        calls[row.module] = number = calls.get(row.module, -1) + 1
        squares, products, gradients = outputs.get((row.module, number), [[], [], []])
        if len(squares) < DRAWS:
            continue
        square = row.variance + row.mean**2
        errors["variances"].append(beyond(square, squares))
        if products and row.correlation is not None:
            together = (row.correlation * row.variance + row.mean**2) / max(square, 1e-300)
            size = sum(squares) / DRAWS
            scaled = [x / max(size, 1e-300) for x in products]
            errors["correlations"].append(beyond(together, scaled, absolute=True))
        if row.grad_variance is not None and len(gradients) == DRAWS:
            errors["gradients"].append(beyond(row.grad_variance, gradients))
    known = [n for n, squares in weights.items() if n in result.weights and any(squares)]
    errors["weights"] = [beyond(result.weights[n], weights[n]) for n in known]
    bounds = {"variances": 0.05, "correlations": 0.03, "gradients": 0.1, "weights": 0.1}
    row: dict[str, Any] = {"outputs": total, "followed": len(errors["variances"])}
    row["in part"] = "; ".join(operation for operation, _ in result.unread)
    for what, bound in bounds.items():
        hits = [error <= bound for error in errors[what]]
        row[what] = [len(hits), round(100 * sum(hits) / len(hits)) if hits else None]
    return row | {"seconds": round(seconds, 1)}


def beyond(expected: float, seen: list[float], absolute: bool = False) -> float:
    """The error, relative unless `absolute`, beyond two standard errors of the measured mean."""
    x = torch.tensor(seen, dtype=torch.float64)
    mean, noise = float(x.mean()), float(x.std()) / len(x) ** 0.5
    error = max(0.0, abs(expected - mean) - 2 * noise)
    if absolute:
        return error
    return error / mean if mean > 1e-14 else (0.0 if expected < 1e-12 else math.inf)


def _send(name: str, sink: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    try:
        sink.send(study(name))
    except Exception as error:  # other libraries' code
        sink.send({"failed": f"{type(error).__name__}: {error}".splitlines()[0][:160]})


def run(names: list[str]) -> None:
    stored = json.loads(DATA.read_text()) if DATA.exists() else {}
    context = multiprocessing.get_context("fork")
    for name in names or MODULES:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_send, args=(name, sender))
        child.start()
        sender.close()
        row = {"failed": f"no end within {SECONDS} s"}
        try:
            row = receiver.recv() if receiver.poll(SECONDS) else row
        except EOFError:
            row = {"failed": "out of memory"}
        child.kill()
        child.join()
        stored[name] = row
        print(name, row, flush=True)
        DATA.write_text(json.dumps(stored, indent=1) + "\n")


def table() -> None:
    rows, stored = [], json.loads(DATA.read_text())
    stored = {name: stored[name] for name in MODULES if name in stored}
    whole = [name for name, row in stored.items() if "failed" not in row and not row["in part"]]
    kinds = ("variances", "correlations", "gradients", "weights")
    counts = dict.fromkeys(kinds, 0)
    for name, row in stored.items():
        if "failed" in row:
            rows.append([name, row["failed"], *[""] * 7])
            continue
        shares = [row[kind][1] for kind in kinds]
        for kind, share in zip(kinds, shares, strict=True):
            counts[kind] += name in whole and share is not None and share >= 95
        cells = ["" if share is None else share for share in shares]
        partly = f"in part: {row['in part']}" if row["in part"] else "whole"
        sizes = [row["outputs"], row["followed"]]
        rows.append([name, partly, *sizes, *cells, row["seconds"]])
    bounds = "within 5 %", "within .03", "within 10 %", "within 10 %"
    heads = [f"{kind} {bound}" for kind, bound in zip(kinds, bounds, strict=True)]
    header = ["module", "followed", "outputs", "predicted", *heads, "seconds"]
    words = f"{len(stored)} of the script's {len(MODULES)} modules were run, {len(whole)} of them "
    words += "are followed whole. Of these "
    words += ", ".join(f"{counts[kind]} have 95 % of {kind}" for kind in kinds)
    words += " within bounds beyond two standard errors."
    page = "theory/any-module"
    tables.put(page, "library modules", words, tables.markdown(header, rows, words=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    run(given.names) if given.what == "run" else table()
