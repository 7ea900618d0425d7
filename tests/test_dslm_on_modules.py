"""DeepScaleLM on real modules: what is stored against predictions, and the whole way once."""

from __future__ import annotations

import copy
import types

import dslm_on_modules as benchmark
import numpy as np
import pytest

import moments

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from moments.torch import audit, describe, fold, initialize, measure  # noqa: E402
from moments.torch.anatomy import anatomy_of  # noqa: E402
from moments.torch.architecture import architecture_of  # noqa: E402
from moments.torch.dataflow.reading import recorded  # noqa: E402
from moments.torch.huggingface_modules import build_module  # noqa: E402
from moments.torch.initialize import attach  # noqa: E402
from moments.torch.running import run  # noqa: E402
from moments.torch.scales import applied_scales, logits_path  # noqa: E402

STORED = benchmark.stored()

pytestmark = [
    pytest.mark.filterwarnings("ignore::moments.ValidityWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
]


# --- what is stored -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["distilbert/12/0", "vit/12/config"])
def test_stored_modules_are_as_predicted(key):
    """Over 32 draws: variance 1 after every layer, gradients, most draws inside the band."""
    kind, layers, dropout = key.split("/")
    found = benchmark.scores(benchmark.case_of(kind, int(layers), dropout), STORED["modules"][key])
    assert found["predicted_off"] < 1e-3
    assert abs(found["measured_mean"] - 1) < 0.02 + 2 * found["mean_stderr"]
    assert found["gradient_error"] < 0.15
    assert found["inside"] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_depths_do_not_matter(norm):
    """DSLM's gradient ratio at 192 and 1000 layers, whatever the gradients' correlation."""
    models = [
        moments.Transformer(n, 64, 4, 32, dropout=0.1, norm=norm).with_scheme(
            "dslm", input_correlation=0.25 / 0.9
        )
        for n in (192, 1000)
    ]
    given = {"correlation": 0.25, "grad_correlation": np.array([0.0, 0.2, 0.4, 0.8])}
    near, far = (moments.predict(model, **given) for model in models)
    ratios = [p.grad_variance[:, 0] / p.grad_variance[:, -1] for p in (near, far)]
    np.testing.assert_allclose(ratios[0], ratios[1], rtol=0.02)
    assert np.all((ratios[0] > 0.2) & (ratios[0] < 3))
    for p in (near, far):
        assert np.abs(p.variance - 1).max() < 0.1


def test_every_stored_module_passed_its_audit():
    for runs in (STORED["modules"], STORED["paper"]):
        for key, row in runs.items():
            assert row.get("refused") or row["audit"]["passed"], key


# --- the whole way --------------------------------------------------------------------------------


def test_from_a_module_to_its_folded_copy():
    """Declared, solved, written, audited, measured inside the prediction, folded."""
    case = benchmark.family_case("gpt2", 12, "config", d_model=48, seq_len=12)
    plan = benchmark.solved(case)
    assert plan.residual < 1e-9
    module = case.build(0)
    assert not audit(module, plan).passed
    done = initialize(module, plan, seed=3)
    assert not done.left
    assert audit(module, plan).passed
    draws = []
    for seed in range(4):
        initialize(module, plan, seed=seed)
        draws.append(measure(module, case.batch(seed), seed=seed))
    p = moments.predict(plan.model, **case.inputs)
    np.testing.assert_allclose(p.variance[1:], 1.0, rtol=1e-6)
    measured = np.array([m.variance for m in draws])
    error = measured.std(0, ddof=1) / np.sqrt(len(draws))
    assert np.all(np.abs(measured.mean(0) - 1) < 0.05 + 4 * error)
    low, high = p.grad_variance_band
    inside = [(low <= m.grad_variance) & (m.grad_variance <= high) for m in draws]
    assert np.mean(inside) > 0.6
    module.eval()
    before = run(module, case.batch(0)).logits
    fold(module, plan)
    assert applied_scales(module) is None
    torch.testing.assert_close(run(module, case.batch(0)).logits, before, rtol=1e-4, atol=1e-4)


# --- the factor on the logits ---------------------------------------------------------------------

KINDS = ("bert", "gpt2", "llama", "vit", "granite", "t5")


def small(kind):
    from moments.model.huggingface.sizes import sized_config

    module = build_module(sized_config(kind, 2, 32, vocab_size=101, seq_len=32), 0)
    model = architecture_of(module)
    wanted = 0.37 * model.head.output_scale
    return module, model.replace(head=model.head.replace(output_scale=wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_scale_reaches_the_logits(kind):
    """Written, seen by the audit and by describe, and folded away; told from a bare copy's own."""
    module, plan = small(kind)
    initialize(module, plan, seed=1)
    bare, batch = copy.deepcopy(module.eval()), recorded(module, None)[1]
    bare.moments_scales.remove()
    plain, scaled = (run(m, batch).logits for m in (bare, module))
    torch.testing.assert_close(scaled, 0.37 * plain, rtol=1e-5, atol=1e-6)
    assert audit(module, plan).passed
    report = audit(bare, plan)
    assert [f.quantity for f in report.offenders] == ["output_scale"]
    assert "logits" in report.findings[0].reason
    head = describe(module, seq_len=16 if kind != "vit" else None).model.head
    assert head.output_scale == pytest.approx(plan.head.output_scale, rel=1e-4)
    fold(module, plan)
    torch.testing.assert_close(run(module, batch).logits, scaled, rtol=1e-4, atol=1e-6)


def test_a_bare_stack_has_no_logits():
    module = transformers.BertModel(
        transformers.BertConfig(
            num_hidden_layers=3, hidden_size=32, num_attention_heads=4, intermediate_size=64
        )
    )
    assert logits_path(anatomy_of(module).roles) is None
    initialize(module, "dslm")
    assert audit(module, "dslm").passed


# --- torch's decoder ------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", [True, False])
def test_both_stacks_of_torch(pre):
    module = torch.nn.Transformer(32, 4, 4, 3, 64, norm_first=pre, batch_first=True)
    model = architecture_of(module, 8)
    assert (model.layers, model.encoder.layers, model.causal) == (3, 4, True)
    found = anatomy_of(module).roles
    assert not found.unidentified
    assert [b.name for b in found.blocks if not b.stack] == ["attention", "cross", "ffn"] * 3
    finals = {r.full_name: (r.layer, r.parameter) for r in found.roles if "final" in r.name}
    assert finals["final.norm.gain"] == (4, "decoder.norm.weight")
    assert finals["encoder.final.norm.gain"] == (5, "encoder.norm.weight")
    offenders = audit(module, model).offenders  # torch copies a layer, and draws matrices anew
    assert {f.quantity for f in offenders} == {"correlation with another layer"}
    assert {f.role.rpartition(".")[2] for f in offenders} == {"bias"}
    given = {"variance": 1.0, "correlation": 0.3}
    plan = moments.solve(model, "dslm", **given, encoder_inputs=given)
    initialize(module, plan)
    assert audit(module, plan).passed
    module.eval()
    _, batch = recorded(module, None)
    x = module.encoder(batch["src"])
    y = batch["tgt"]
    a, b = (1 / 3) ** 0.5, (2 / 3) ** 0.5  # beta^2 = 2 / N
    bare = copy.deepcopy(module)
    bare.moments_scales.remove()
    with torch.no_grad():  # written out
        for layer in bare.decoder.layers:

            def cross(z, layer=layer):
                return layer.multihead_attn(z, x, x, need_weights=False)[0]

            def own(z, layer=layer):
                return layer.self_attn(z, z, z, need_weights=False)[0]

            def ffn(z, layer=layer):
                return layer.linear2(layer.linear1(z).relu())

            for f, norm in ((own, layer.norm1), (cross, layer.norm2), (ffn, layer.norm3)):
                y = a * y + b * f(norm(y)) if pre else norm(a * y + b * f(y))
        y = bare.decoder.norm(y)
    scaled = run(module, batch)
    torch.testing.assert_close(scaled, y, rtol=1e-4, atol=1e-5)
    fold(module, plan)
    torch.testing.assert_close(run(module, batch), scaled, rtol=1e-4, atol=1e-5)


def test_a_decoder_alone_takes_a_plan_but_no_scheme():
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
    module = torch.nn.TransformerDecoder(layer, 3)
    assert architecture_of(module) is None
    with pytest.raises(moments.DomainError, match="architecture, which could not be read"):
        initialize(module, "dslm")
    whole = architecture_of(torch.nn.Transformer(32, 4, 3, 3, 64, batch_first=True), 8)
    given = {"variance": 1.0, "correlation": 0.3}
    plan = moments.solve(whole, "dslm", **given, encoder_inputs=given)
    initialize(module, plan)
    assert audit(module, plan).passed


def test_scores_see_a_departure():
    """The benchmark's own measures on numbers made by hand."""
    run = {
        "variance": np.array([[2.0, 0.9, 1.1], [2.0, 1.1, 1.3]]),
        "grad_variance": np.array([[4.0, 2.0, 1.0], [9.0, 2.0, 0.4]]),
    }
    prediction = types.SimpleNamespace(
        variance=np.array([2.0, 1.0, 1.0]),
        grad_variance=np.array([4.0, 2.0, 1.0]),
        grad_variance_band=np.array([[2.0, 1.0, 0.5], [8.0, 4.0, 2.0]]),
    )
    found = benchmark.against(run, prediction)
    assert (found["entering"], found["predicted_off"]) == (2.0, 0.0)
    assert (found["measured_off"], found["stderr"]) == pytest.approx((0.2, 0.1))
    assert (found["measured_mean"], found["mean_stderr"]) == pytest.approx((1.1, 0.1))
    assert found["ratio"] == 4.0
    assert found["inside"] == pytest.approx(4 / 6)


# --- what a stored module loses -------------------------------------------------------------------


def test_scales_are_put_back_on_stored_weights():
    module, plan = small("gpt2")
    plan = plan.replace(skip_scale=0.8, branch_scale=0.5, temperature=2.0)
    initialize(module, plan, seed=1)
    rebuilt, _ = small("gpt2")
    rebuilt.load_state_dict(module.state_dict())
    assert not audit(rebuilt, plan).passed
    assert attach(rebuilt, plan) is rebuilt.moments_scales
    assert audit(rebuilt, plan).passed
    _, batch = recorded(module, None)
    torch.testing.assert_close(
        run(rebuilt.eval(), batch).logits, run(module.eval(), batch).logits, rtol=0, atol=0
    )
    fold(rebuilt, plan)
    with pytest.raises(moments.DomainError, match="folded"):
        attach(rebuilt, plan)


def test_measured_block_outputs_are_those_of_the_blocks():
    """Not what the hooks make of them for the sum: the twin, which has no hooks, agrees."""
    case = benchmark.torch_case("nn.TransformerEncoder, Pre-LN", 3, "0", d_model=64, seq_len=16)
    plan = moments.solve(case.model, "dslm", **case.inputs, options={"variant": "solved"})
    module = case.build(0)
    found = []
    for seed in range(6):
        initialize(module, plan, seed=seed)
        m = measure(module, case.batch(seed), seed=seed)
        frame = m.to_frame()
        found.append(frame[frame.site.isin(["attention.projection", "ffn.out"])])
    variance = np.mean([f.variance for f in found], axis=0)
    np.testing.assert_allclose(variance, 1.0, atol=0.3)
    twin = moments.simulate(plan.model, variance=1.0, correlation=0.05, seeds=4).to_frame()
    twin = twin[twin.site.isin(["attention.projection", "ffn.out"])]
    gradient = np.mean([f.grad_variance for f in found], axis=0)
    np.testing.assert_allclose(np.log(gradient / twin.grad_variance), 0.0, atol=0.5)
