"""Plans written into real modules: exact variances, and hooks that compute what is declared."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import warnings

import numpy as np
import pytest

import moments
from moments import DomainError, MomentsError, Transformer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import small_modules  # noqa: E402

from moments.torch import audit, fold, initialize  # noqa: E402
from moments.torch.anatomy import anatomy_of  # noqa: E402
from moments.torch.architecture import architecture_of  # noqa: E402
from moments.torch.scales import applied_scales, remove_scales  # noqa: E402

LAYERS, WIDTH = 2, 32
SKIP, BRANCH = (0.9, 0.8), (0.5, 0.4)


def encoder(norm_first=True, dropout=0.1):
    return small_modules.encoder(LAYERS, WIDTH, 64, dropout=dropout, pre=norm_first)


def family(kind, **changes):
    return small_modules.family_module(kind, LAYERS, WIDTH, **changes)


def gpt2(**changes):
    return family("gpt2", **changes)


def opt(**changes):
    return family("opt", **changes)


def stubborn_opt():
    """Its dropout is none of the numbers that its layers hold."""
    module = opt()
    kind = type(module.model.decoder.layers[0])
    fixed = property(lambda layer: 0.1, lambda layer, value: None)
    for layer in module.model.decoder.layers:
        layer.__class__ = type("Layer", (kind,), {"dropout": fixed})
    return module


def scaled(module, **changes):
    return architecture_of(module).replace(skip_scale=SKIP, branch_scale=BRANCH, **changes)


IDS = np.arange(22).reshape(2, 11) % 101


# --- weights --------------------------------------------------------------------------------------


def test_every_matrix_has_the_variance_of_the_plan():
    """A wide layer, so that a percent shows: 4 standard errors of the mean square."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    weights = moments.Weights([1e-3, 2e-3], [3e-3, 4e-3], 5e-3, 6e-3, [7e-3, 8e-3], 9e-3)
    plan = architecture_of(module).replace(weights=weights)
    for distribution, kurtosis in (
        ("normal", 3.0),
        ("uniform", 1.8),
        ("truncated", 2.37),
        ("orthogonal", 3.0),
    ):
        done = initialize(module, plan, seed=2, distribution=distribution)
        for number, layer in enumerate(module.layers, start=1):
            expected = plan.layer_weights(number)
            query, key, value = layer.self_attn.in_proj_weight.detach().chunk(3)
            for w, variance in (
                (query, expected.query),
                (key, expected.key),
                (value, expected.value),
                (layer.self_attn.out_proj.weight, expected.output),
                (layer.linear1.weight, expected.ffn_in),
                (layer.linear2.weight, expected.ffn_out),
            ):
                spread = math.sqrt((kurtosis - 1) / w.numel())
                square = float(w.detach().double().square().mean())
                assert abs(square / variance - 1) < 4.5 * spread, distribution
        frame = done.to_frame()
        assert len(frame) == len(list(module.layers)) * (6 + 6 + 4)
        assert not done.left
        assert done.scales is None


def test_shapes_of_the_distributions():
    from scipy import stats

    layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    plan = architecture_of(module).replace(weights=moments.Weights.normal(0.01))
    references = {
        "normal": stats.norm(scale=0.1),
        "uniform": stats.uniform(-0.1 * math.sqrt(3), 0.2 * math.sqrt(3)),
        "truncated": stats.truncnorm(-2, 2, scale=0.1 / stats.truncnorm.std(-2, 2)),
    }
    for name, reference in references.items():
        initialize(module, plan, seed=3, distribution=name)
        entries = module.layers[0].linear1.weight.detach().double().numpy().ravel()
        assert stats.kstest(entries, reference.cdf).pvalue > 1e-4
        assert abs(entries).max() <= reference.support()[1]
    initialize(module, plan, seed=3, distribution="orthogonal")
    w = module.layers[0].linear1.weight.detach().double()
    torch.testing.assert_close(
        w.T @ w, 2.56 * torch.eye(128, dtype=torch.float64), atol=1e-5, rtol=0
    )


def test_the_same_seed_the_same_entries():
    module = gpt2()
    plan = architecture_of(module)
    first = [initialize(module, plan, seed=4) and p.clone() for p in module.parameters()]
    torch.manual_seed(9)
    initialize(module, plan, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first, module.parameters(), strict=True))
    initialize(module, plan, seed=5)
    changed = [
        n
        for (n, p), a in zip(module.named_parameters(), first, strict=True)
        if p.ndim > 1 and torch.equal(a, p)
    ]
    assert not changed


def test_fused_and_transposed_matrices_are_filled_part_by_part():
    """GPT-2's Conv1D holds thirds of its columns, GPT-NeoX rows by head."""
    weights = moments.Weights(1.0, 4.0, 16.0, 1.0, 1.0, 1.0)
    module = gpt2()
    initialize(module, architecture_of(module).replace(weights=weights))
    fused = module.transformer.h[1].attn.c_attn.weight.detach()
    squares = [float(w.square().mean()) for w in fused.split(WIDTH, dim=1)]
    np.testing.assert_allclose(squares, [1, 4, 16], rtol=0.2)
    module = family("gpt_neox")
    initialize(module, architecture_of(module).replace(weights=weights))
    fused = module.gpt_neox.layers[0].attention.query_key_value.weight.detach()
    by_head = fused.view(4, 3, WIDTH // 4, WIDTH)
    squares = by_head.square().mean((0, 2, 3))
    np.testing.assert_allclose(squares, [1, 4, 16], rtol=0.2)


def test_biases_norms_tables_and_padding():
    module = family("bert", vocab_size=400)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1.0)
    model = architecture_of(module)
    plan = model.replace(embedding=model.embedding.replace(token_variance=0.04))
    done = initialize(module, plan)
    assert not done.left
    tables = module.bert.embeddings
    assert float(tables.word_embeddings.weight.detach()[1:].var()) == pytest.approx(0.04, rel=0.06)
    assert not tables.word_embeddings.weight[0].any()
    for name, p in module.named_parameters():
        if "LayerNorm.weight" in name:
            assert torch.equal(p, torch.ones_like(p))
        elif name.endswith("bias"):
            assert not p.any()


def test_gains_that_are_stored_less_one():
    module = family("gemma2")
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.5)
    initialize(module, architecture_of(module))
    assert not module.model.layers[0].input_layernorm.weight.any()
    assert audit(module, architecture_of(module)).passed


# --- scales ---------------------------------------------------------------------------------------


def by_hand(module, x, norm_first, norm_scales=(1.0, 1.0)):
    """The encoder written out with its own submodules, which drop in the same order."""
    for layer, a, b, s in zip(module.layers, SKIP, BRANCH, norm_scales, strict=True):

        def attention(z, layer=layer):
            return layer.dropout1(layer.self_attn(z, z, z, need_weights=False)[0])

        def ffn(z, layer=layer):
            return layer.dropout2(layer.linear2(layer.dropout(layer.activation(layer.linear1(z)))))

        for f, norm in ((attention, layer.norm1), (ffn, layer.norm2)):
            x = a * x + b * f(s * norm(x)) if norm_first else s * norm(a * x + b * f(x))
    return x


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("scaling", [False, True])
def test_hooks_compute_the_declared_layer(norm_first, scaling):
    """Output and gradients in training mode, dropout included."""
    module = encoder(norm_first)
    plan = scaled(module, layernorm_scaling=scaling)
    initialize(module, plan, seed=1)
    bare = copy.deepcopy(module)
    remove_scales(bare)
    assert applied_scales(bare) is None
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(11)
    hooked = module(x)
    torch.manual_seed(11)
    written = by_hand(bare, x, norm_first, plan.norm_scales)
    torch.testing.assert_close(hooked, written, rtol=1e-5, atol=1e-6)
    hooked.square().sum().backward()
    written.square().sum().backward()
    for p, q in zip(module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)


def test_scaling_before_the_norm_and_behind_the_sum():
    module = encoder()
    x = torch.randn(2, 7, WIDTH)
    for where in ("before-norm", "after-block", "after-residual", "attention-only", "ffn-only"):
        plan = architecture_of(module).replace(layernorm_scaling=where)
        initialize(module, plan, seed=1)
        bare = copy.deepcopy(module.eval())
        remove_scales(bare)
        y = x
        with torch.no_grad():
            for number, layer in enumerate(bare.layers, start=1):
                s = 1 / math.sqrt(number)
                for f, norm, name in (
                    (lambda z, m=layer: m.self_attn(z, z, z)[0], layer.norm1, "attention"),
                    (lambda z, m=layer: m.linear2(m.linear1(z).relu()), layer.norm2, "ffn"),
                ):
                    z = norm(s * y if where == "before-norm" else y)
                    z = f(s * z if where == f"{name}-only" else z)
                    y = y + (s * z if where == "after-block" else z)
                    y = s * y if where == "after-residual" else y
            torch.testing.assert_close(module(x), y, rtol=1e-5, atol=1e-5, msg=where)


def test_hooks_survive_copies_threads_and_checkpointing():
    module = gpt2(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    initialize(module, scaled(module), seed=1)
    ids = torch.as_tensor(IDS)
    expected = module(ids).logits
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(ids).logits, expected)
        twin.moments_scales.remove()
        assert applied_scales(twin) is None
        assert not any(p._forward_hooks or p._forward_pre_hooks for p in twin.modules())
    torch.testing.assert_close(module(ids).logits, expected)  # the original keeps its own

    found = {}
    workers = [
        threading.Thread(target=lambda n=n: found.setdefault(n, module(ids[n : n + 1]).logits))
        for n in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.testing.assert_close(torch.cat([found[0], found[1]]), expected, rtol=1e-4, atol=1e-5)

    module.train()
    module(ids).logits.square().sum().backward()
    plain = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with warnings.catch_warnings():  # it has another name from transformers 6 on
        warnings.simplefilter("ignore", FutureWarning)
        module.gradient_checkpointing_enable({"use_reentrant": False})
    module(ids, use_cache=False).logits.square().sum().backward()
    for gradient, p in zip(plain, module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_dropout_inside_a_function_is_taken_over():
    """OPT drops a block's output without a module: the same mask, and the stream beside it."""
    module = opt()
    plan = scaled(module).replace(skip_scale=[(0.9, 0.9), (1.0, 0.8)])
    initialize(module, plan, seed=1)
    initialize(module, plan, seed=1)  # finds what the first has taken
    assert audit(module, plan).passed
    bare, twin = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    bare.moments_scales.remove()
    held = [[layer.dropout for layer in m.model.decoder.layers] for m in (bare, module, twin)]
    assert held == [[0.1, 0.1], [0.0, 0.0], [0.0, 0.0]]
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    drop = torch.nn.functional.dropout
    for n, layer in enumerate(bare.model.decoder.layers):
        (a, c), (b, d) = plan.by_block("skip_scale")[n], plan.by_block("branch_scale")[n]
        torch.manual_seed(11)
        y = a * x + b * drop(layer.self_attn(layer.self_attn_layer_norm(x))[0], 0.1)
        y = c * y + d * drop(layer.fc2(layer.fc1(layer.final_layer_norm(y)).relu()), 0.1)
        for own in (module, twin):
            torch.manual_seed(11)
            found = own.train().model.decoder.layers[n](x)
            found = found if torch.is_tensor(found) else found[0]
            torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-6)
    initialize(module, plan.replace(skip_scale=1.0))
    assert [layer.dropout for layer in module.model.decoder.layers] == [0.1, 0.1]


def test_the_handle_says_what_it_does():
    module = encoder()
    done = initialize(module, scaled(module))
    assert done.scales is module.moments_scales
    assert [row.layer for row in done.scales.rows] == [1, 1, 2, 2]
    assert "layer 2 attention, ffn: skip 0.8, branch 0.4" in str(done)
    initialize(module, architecture_of(module))  # a plan without scales takes them off
    assert applied_scales(module) is None


def test_parallel_blocks_share_one_sum():
    module = family("gpt_neox")
    plan = scaled(module)
    initialize(module, plan)
    assert audit(module, plan).passed
    uneven = plan.replace(skip_scale=[(0.9, 0.8), (0.9, 0.8)])
    with pytest.raises(DomainError, match="one skip scale, not two"):
        initialize(module, uneven)


class Damped(torch.nn.Module):
    """Code that multiplies what every block adds, and the logits."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.table = factor, torch.nn.Embedding(50, WIDTH)
        self.layers = torch.nn.ModuleList([DampedLayer(factor) for _ in range(LAYERS)])
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 50, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.factor * self.head(self.norm(x))


class DampedLayer(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH) for _ in range(2)])
        self.attend = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        up, down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.feed = torch.nn.Sequential(up, torch.nn.ReLU(), down)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.factor * self.attend(y, y, y, need_weights=False)[0]
        return x + self.factor * self.feed(self.norms[1](x))


def test_hooks_replace_a_factor_of_the_code_and_do_not_multiply_it() -> None:
    """Also the second time, when the hooks of the first are read with the code, and when folded."""
    ids = torch.randint(0, 50, (2, 8))
    torch.manual_seed(0)
    module, plain = Damped(0.3), Damped(1.0)
    own = moments.torch.describe(module).model
    assert np.allclose((own.branch_scale, own.head.output_scale), 0.3)
    assert initialize(module, own, seed=1).scales is None
    for branch in (0.5, 0.7):
        plan = own.replace(branch_scale=branch, head=own.head.replace(output_scale=2 * branch))
        initialize(module, plan, seed=2)
        initialize(plain, plan, seed=2)
        found = moments.torch.describe(module).model
        assert np.allclose((found.branch_scale, found.head.output_scale), (branch, 2 * branch))
        expected = plain(ids)
        assert torch.allclose(module(ids), expected, atol=1e-5)
    folded = fold(module, plan)
    assert applied_scales(folded) is None
    assert torch.allclose(folded(ids), expected, atol=1e-5)


def test_own_multiplier_of_the_module():
    module = family("granite", residual_multiplier=0.25, attention_multiplier=0.3)
    own = architecture_of(module)
    assert own.branch_scale == 0.25
    assert initialize(module, own).scales is None
    assert audit(module, own).passed
    plan = scaled(module)
    initialize(module, plan)
    assert audit(module, plan).passed


def test_temperature_goes_into_the_attention():
    module = gpt2()
    plan = architecture_of(module).replace(temperature=[2.0, 3.0])
    initialize(module, plan)
    assert [h.attn.scaling for h in module.transformer.h] == pytest.approx(
        [1 / (math.sqrt(8) * 2), 1 / (math.sqrt(8) * 3)]
    )
    assert audit(module, plan).passed
    assert not audit(module, plan.replace(temperature=1.0)).passed


def test_residual_branches_without_norms():
    """ReZero's: an nn.Identity in place of every norm, and branches that start at nothing."""
    module = gpt2()
    for block in module.transformer.h:
        block.ln_1, block.ln_2 = torch.nn.Identity(), torch.nn.Identity()
    assert {b.placement for b in anatomy_of(module).roles.blocks} == {"none"}
    plan = architecture_of(module).replace(norm="none", branch_scale=0.0)
    initialize(module, plan)
    module.eval()
    seen = []
    module.transformer.h[1].register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    module(torch.as_tensor(IDS))
    entering, leaving = seen[0]
    torch.testing.assert_close(leaving if torch.is_tensor(leaving) else leaving[0], entering)


# --- modules of one's own -------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_a, self.norm_f = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.wqkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.wo = torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x):
        q, k, v = self.wqkv(self.norm_a(x)).chunk(3, dim=-1)
        mixing = (q @ k.transpose(1, 2) / math.sqrt(WIDTH)).softmax(-1)
        x = x + self.wo(mixing @ v)
        return x + self.down(self.up(self.norm_f(x)).relu())


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.odd = torch.nn.Parameter(torch.zeros(3))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def own_plan(**changes):
    embedding = moments.Embedding(50, 0.01)
    return Transformer(
        LAYERS, WIDTH, 1, 8, d_ff=64, embedding=embedding, weights=moments.Weights.normal(0.03),
        **changes,
    )  # fmt: skip


def test_a_module_of_ones_own():
    module, plan = Own(), own_plan(skip_scale=SKIP, branch_scale=BRANCH)
    ids = torch.arange(16).reshape(2, 8)
    done = initialize(module, plan)
    assert set(done.left) == {"odd"}
    report = audit(module, plan, batch=ids)
    assert report.passed, str(report)
    assert "of unknown role: odd" in report.unchecked
    remove_scales(module)
    assert not audit(module, plan, batch=ids).passed


class Scaled(Block):
    """Its branch scales are parameters of its own."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta = (torch.nn.Parameter(torch.ones(())) for _ in range(2))

    def forward(self, x):
        q, k, v = self.wqkv(self.norm_a(x)).chunk(3, dim=-1)
        mixing = (q @ k.transpose(1, 2) / math.sqrt(WIDTH)).softmax(-1)
        x = x + self.alpha * self.wo(mixing @ v)
        return x + self.beta * self.down(self.up(self.norm_f(x)).relu())


def test_scales_in_parameters_of_the_module():
    module = Own()
    module.blocks = torch.nn.ModuleList(Scaled() for _ in range(LAYERS))
    done = initialize(module, own_plan(branch_scale=BRANCH))
    assert [b.alpha.item() for b in module.blocks] == pytest.approx(BRANCH)
    assert [b.beta.item() for b in module.blocks] == pytest.approx(BRANCH)
    assert done.scales is None
    with pytest.raises(DomainError, match="none for skip_scale"):
        initialize(module, own_plan(skip_scale=0.9))


# --- refusals -------------------------------------------------------------------------------------


def deeper(module):
    return architecture_of(module).replace(layers=3)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda m: initialize(m, deeper(m)), DomainError, "layers of the plan = 3"),
        (lambda m: initialize(m, "post-ln"), DomainError, "norm of the plan"),
        (lambda m: initialize(m, scaled(m, normalization="rmsnorm")), DomainError, "normalization"),
        (lambda m: initialize(m, scaled(m), distribution="cauchy"), DomainError, "distribution"),
        (lambda m: initialize(m, scaled(m), seed=-1), DomainError, "seed"),
        (lambda m: initialize(m, {}), DomainError, "plan"),
        (lambda m: initialize(m, "no such scheme"), DomainError, "scheme"),
        (lambda m: initialize(3, "xavier"), DomainError, "module"),
        (lambda m: initialize(torch.nn.Linear(2, 2), "xavier"), MomentsError, "no attention"),
        (lambda m: initialize(m.to("meta"), scaled(m)), DomainError, "to_empty"),
        (lambda m: initialize(m, scaled(m, temperature=2.0)), DomainError, "temperature"),
        (lambda m: initialize(o := stubborn_opt(), scaled(o)), DomainError, "pass through"),
    ],
)  # fmt: skip
def test_refusals(call, kind, text):
    with pytest.raises(kind, match=text):
        call(encoder())


def test_a_refusal_changes_nothing():
    module = stubborn_opt()
    before = {name: p.clone() for name, p in module.named_parameters()}
    with pytest.raises(DomainError):
        initialize(module, scaled(module))
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    assert applied_scales(module) is None
    undropped = opt(dropout=0.0)
    initialize(undropped, scaled(undropped))
    assert audit(undropped, scaled(undropped)).passed
    fold(module, scaled(module))
    with pytest.raises(DomainError):
        initialize(module, scaled(module))
    with pytest.raises(DomainError, match="folded before"):
        fold(module, scaled(module))


def test_an_infeasible_plan_is_refused() -> None:
    model = moments.Transformer(2, 32, 4, 16)
    with pytest.warns(moments.ValidityWarning, match="not feasible"):
        plan = moments.solve(model, "final_variance", target=0.5)
    assert not plan.feasible
    module = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(32, 4, 128, norm_first=True, batch_first=True),
        2,
        enable_nested_tensor=False,
    )
    with pytest.raises(moments.DomainError, match="not feasible"):
        moments.torch.initialize(module, plan)
