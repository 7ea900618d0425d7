"""Audits: right modules pass, planted bugs are named with the right tensor and a likely cause."""

from __future__ import annotations

import copy
import math

import pytest

import moments
from moments import DomainError, MomentsError, Transformer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import small_modules  # noqa: E402

from moments.show.expected import tail_probability  # noqa: E402
from moments.torch import audit  # noqa: E402
from moments.torch.anatomy import anatomy_of, as_drawn  # noqa: E402
from moments.torch.architecture import architecture_of  # noqa: E402
from moments.torch.entries import SHAPES, EntryMoments  # noqa: E402
from moments.torch.initialize import initialize  # noqa: E402
from moments.torch.scales import remove_scales  # noqa: E402

LAYERS, WIDTH = 3, 48


def encoder():
    return small_modules.encoder(LAYERS, WIDTH, 96, final=True)


FAMILIES = ("bert", "gpt2", "llama", "encoder")


def module_of(kind):
    if kind == "encoder":
        return encoder()
    # As wide inside as the encoder
    inner = {"n_inner": 96} if kind == "gpt2" else {"intermediate_size": 96}
    return small_modules.family_module(kind, LAYERS, WIDTH, vocab_size=200, **inner)


@pytest.fixture(scope="module", params=FAMILIES)
def built(request):
    """A module, and a plan that gives every matrix its own variance in every layer."""
    torch.manual_seed(0)
    module = module_of(request.param)
    model = architecture_of(module)
    weights = moments.Weights(
        query=1 / WIDTH,
        key=1 / WIDTH,
        value=[2 / (WIDTH * n) for n in range(1, LAYERS + 1)],
        output=[0.6 / (WIDTH * n) for n in range(1, LAYERS + 1)],
        ffn_in=2 / WIDTH,
        ffn_out=2 / (WIDTH * 2 * LAYERS),
    )
    plan = model.replace(
        weights=weights, skip_scale=math.sqrt(1 - 0.4 / 3), branch_scale=[0.4, 0.35, 0.3]
    )
    return module, plan


@pytest.fixture
def fresh(built):
    """A copy of the module, initialised as planned."""
    module, plan = copy.deepcopy(built[0]), built[1]
    initialize(module, plan, seed=5)
    return module, plan


def blocks(module, *names):
    """(label, view) of every matrix of a role, in the order of the layers."""
    tensors = dict(module.named_parameters())
    roles = anatomy_of(module).roles.named(*names)
    return [(role.label, role.part.of(tensors[role.parameter].detach())) for role in roles]


def reasons(report):
    return [finding.reason for finding in report.findings]


def failed(report, quantity="variance"):
    return {f.parameter for f in report.offenders if f.quantity == quantity}


# --- right modules --------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["normal", "uniform", "truncated", "orthogonal"])
def test_a_right_module_passes(built, distribution):
    module, plan = copy.deepcopy(built[0]), built[1]
    for seed in range(2):
        initialize(module, plan, seed=seed, distribution=distribution)
        report = audit(module, plan)
        assert report.passed, str(report)
        assert not report.offenders
        assert not any("unknown role" in words for words in report.unchecked)
        assert all(f.passed for f in report.rows)


def test_probabilities_of_right_modules_are_uniform():
    """Small matrices, whose sampling error is largest: no alarm, and a share q below every q."""
    module = small_modules.encoder(2, 16, 32)
    plan = architecture_of(module).replace(skip_scale=0.8, branch_scale=0.6)
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(40):
        distribution = ("normal", "uniform")[seed % 2]
        initialize(module, plan, seed=seed, distribution=distribution)
        report = audit(module, plan)
        assert report.passed, seed
        for finding in report.rows:
            if finding.quantity.startswith(("variance", "mean")) and 0 < finding.probability < 1:
                kind = (distribution, finding.quantity)
                found.setdefault(kind, []).append(finding.probability)
    assert len(found) == 6
    for kind, probabilities in found.items():
        count = len(probabilities)
        for level in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9):
            below = sum(p < level for p in probabilities)
            allowed = 4.5 * math.sqrt(count * level * (1 - level))
            assert abs(below - count * level) < allowed, (kind, level, below / count)


def test_the_framework_passes_its_own_initialisation(built):
    """Except that nn.TransformerEncoder copies one layer, which is told tensor by tensor."""
    module = copy.deepcopy(built[0])
    if isinstance(module, torch.nn.TransformerEncoder):
        report = audit(module, architecture_of(module))
        assert {f.quantity for f in report.offenders} == {"correlation with another layer"}
        named = {f.parameter for f in report.offenders}
        assert {"layers.1.linear2.weight", "layers.2.linear1.bias"} <= named
        assert not any(name.startswith("layers.0") for name in named)
        assert "linear1.weight" in next(f.note for f in report.offenders if f.role == "ffn_in")
        (sentence,) = reasons(report)
        assert sentence.startswith("query, key, value, output, ffn_in, ffn_out, ffn_in.bias")
        assert "of layers 2 to 3 hold the same entries" in sentence
        module.layers = torch.nn.ModuleList(encoder().layers[0] for _ in range(LAYERS))
    report = audit(module, architecture_of(module))
    assert report.passed, str(report)


def test_a_scheme_by_name(fresh):
    module, _ = fresh
    initialize(module, "xavier", seed=1)
    assert audit(module, "xavier").passed
    report = audit(module, "normal")
    assert {"value", "ffn_in"} <= {f.role for f in report.offenders}


def test_xavier_by_head_and_by_matrix():
    """Both readings, and which one the module has; the plan by its name, or as a model."""
    module = small_modules.family_module("llama", 2, 64, num_key_value_heads=2)
    for name, p in module.named_parameters():
        if name.endswith("proj.weight"):
            torch.nn.init.xavier_uniform_(p)
    by_head = "each head of query, key and value as a matrix of its own, 2/(d_model + d_head) ("
    whole = "query, key and value as whole matrices, 2/(fan_in + fan_out), as xavier_uniform_ does"
    (sentence,) = reasons(audit(module, "xavier"))
    assert whole in sentence
    assert "per_head=false" in sentence
    assert "; or" not in sentence
    assert audit(module, "xavier", options={"per_head": False}).passed
    model = architecture_of(module)
    (sentence,) = reasons(audit(module, model.with_scheme("xavier")))
    assert whole in sentence
    initialize(module, "xavier", seed=3)
    (sentence,) = reasons(audit(module, "xavier", options={"per_head": False}))
    assert by_head in sentence
    assert "per_head=true" in sentence
    with pytest.raises(DomainError, match="options"):
        audit(module, model, options={"per_head": False})
    with pytest.raises(DomainError, match="option of xavier"):
        audit(module, "xavier", options={"by_head": False})


def test_false_alarms_of_the_chi_square_limit():
    """Exact for normal entries: at probability q, a share q of right tensors fails."""
    generator = torch.Generator().manual_seed(3)
    draws = torch.randn((4000, 600), generator=generator)
    found = [EntryMoments.of(row) for row in draws]
    below = sum(tail_probability(e.square, e.spread) < 0.02 for e in found)
    assert abs(below - 80) < 4.5 * math.sqrt(80)


def test_statistics_of_known_distributions():
    from scipy import stats

    cut = stats.truncnorm(-2, 2)
    known = {"uniform": stats.uniform(-1, 2), "truncated": cut, "normal": stats.norm()}
    for shape in SHAPES:
        of = known[shape.name]
        wanted = [of.moment(k) / of.var() ** (k / 2) for k in (2, 4, 6, 8)]
        assert shape.moments == pytest.approx(wanted, rel=1e-9)
    generator = torch.Generator().manual_seed(4)
    uniform = EntryMoments.of(torch.rand(20000, generator=generator) - 0.5)
    assert uniform.kurtosis == pytest.approx(1.8, abs=0.05)
    assert uniform.distribution == "uniform"
    assert EntryMoments.of(torch.randn(20000, generator=generator)).distribution == "normal"
    assert EntryMoments.of(torch.zeros(9)).distribution == "zero"


@pytest.mark.parametrize("count", [64, 512, 4096])
def test_few_entries_are_not_classified_and_many_are(count):
    """200 samples each: never another's name, and from 4,096 entries on always its own."""
    generator = torch.Generator().manual_seed(count)
    draws = {
        "uniform": lambda x: x.uniform_(-1, 1, generator=generator),
        "normal": lambda x: x.normal_(generator=generator),
        "truncated": lambda x: torch.nn.init.trunc_normal_(x, 0, 1, -2, 2, generator=generator),
    }
    for name, draw in draws.items():
        seen = {EntryMoments.of(draw(torch.empty(count))).distribution for _ in range(200)}
        assert seen == {""} if count == 64 else seen <= {"", name}
        assert count < 4096 or seen == {name}


# --- seven planted bugs ---------------------------------------------------------------------------


def test_the_wrong_ffn_matrix_scaled(fresh):
    module, plan = fresh
    scale = 1 / math.sqrt(2 * LAYERS)
    inner, outer = blocks(module, "ffn_in"), blocks(module, "ffn_out")
    for _, w in inner:
        w.mul_(scale)
    for _, w in outer:
        w.div_(scale)
    report = audit(module, plan)
    assert failed(report) == {label for label, _ in inner + outer}
    assert {f.role for f in report.offenders} == {"ffn_in", "ffn_out"}
    (sentence,) = reasons(report)  # one cause, not one for each matrix
    assert sentence.startswith("ffn_in carries the factor")
    assert "wrong matrix" in sentence


def test_value_skipped(fresh):
    module, plan = fresh
    for _, w in blocks(module, "value"):
        torch.nn.init.normal_(w, std=WIDTH**-0.5)  # as query and key
    report = audit(module, plan)
    last = blocks(module, "value")[-1][0]
    assert last in failed(report)
    assert {f.role for f in report.offenders} == {"value"}
    sentence = next(s for s in reasons(report) if s.startswith("value"))
    assert "what the plan gives query" in sentence or "what the plan gives key" in sentence


def test_query_key_value_scaled_instead_of_output(fresh):
    module, plan = fresh
    for _, w in blocks(module, "query", "key", "value"):
        w.mul_(0.5)
    for _, w in blocks(module, "output"):
        w.mul_(2)
    report = audit(module, plan)
    everything = blocks(module, "query", "key", "value", "output")
    assert failed(report) == {label for label, _ in everything}
    assert any(
        "query and key and value carry the factor" in s and "output lack" in s
        for s in reasons(report)
    )


def test_a_scale_erased(built):
    """A beta kept in a buffer, which materialisation fills with zeros."""
    module, plan = copy.deepcopy(built[0]), built[1]
    initialize(module, plan.replace(branch_scale=1.0), seed=2)
    for block in anatomy_of(module).roles.blocks:
        part = module.get_submodule(block.branch.path)
        beta = plan.by_block("branch_scale")[block.layer - 1, block.column]
        part.register_buffer("beta", torch.tensor(float(beta)), persistent=False)
        hook = part.register_forward_hook(scaled_by_buffer, prepend=False)
        part._forward_hooks.move_to_end(hook.id, last=False)
    assert audit(module, plan).passed
    victim = anatomy_of(module).roles.blocks[3]
    module.get_submodule(victim.branch.path).beta.zero_()
    report = audit(module, plan)
    (offender,) = report.offenders
    assert (offender.layer, offender.role) == (victim.layer, victim.name)
    assert offender.quantity == "branch_scale"
    assert offender.parameter == victim.branch.path
    assert any("erased" in s and "buffer" in s for s in reasons(report))


def scaled_by_buffer(part, _, output):
    first = output[0] if isinstance(output, tuple) else output
    return part.beta * first


def test_a_truncated_normal_without_correction(fresh):
    module, plan = fresh
    for place, (_, w) in enumerate(blocks(module, "query")):
        std = math.sqrt(plan.layer_weights(place + 1).query)
        drawn = torch.empty(w.numel())
        torch.nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std)
        w.copy_(drawn.reshape(w.shape))
    report = audit(module, plan)
    assert {f.role for f in report.offenders} == {"query"}
    assert failed(report) | failed(report, "variance over its expectation")
    sentence = next(s for s in reasons(report) if s.startswith("query"))
    assert "cut at two deviations without correcting" in sentence


@pytest.mark.parametrize("role", ["output", "ffn_out"])
def test_a_zeroed_output_projection(fresh, role):
    module, plan = fresh
    label, w = blocks(module, role)[1]
    w.zero_()
    report = audit(module, plan)
    assert failed(report) == {label}
    assert report.offenders[0].parameter == label
    assert report.offenders[0].note == "every entry is 0"
    assert any(role in s and "zero" in s and "layer 2" in s for s in reasons(report))


def test_the_residual_multiplier_missing(fresh):
    module, plan = fresh
    remove_scales(module)
    report = audit(module, plan)
    assert {f.quantity for f in report.offenders} == {"branch_scale", "skip_scale"}
    assert len(report.offenders) == 4 * LAYERS
    assert all(f.measured == pytest.approx(1, abs=1e-4) for f in report.offenders)
    assert any("residual multiplier beta" in s and "missing" in s for s in reasons(report))
    assert any("skip multiplier lambda" in s and "missing" in s for s in reasons(report))
    assert all("attach(module, plan)" in found.mend for found in report.findings)


def test_two_stacks_are_told_apart():
    """In an encoder deeper than its decoder: the encoder's layers, names and causes."""
    torch.manual_seed(0)
    module = torch.nn.Transformer(WIDTH, 4, 4, 2, 96, batch_first=True)
    plan = architecture_of(module).replace(biases=None, branch_scale=0.5)
    plan = plan.replace(encoder=plan.encoder.replace(biases=None, branch_scale=0.4))
    initialize(module, plan, seed=5)
    assert audit(module, plan).passed
    scale = 1 / math.sqrt(2 * LAYERS)
    tensors = dict(module.named_parameters())
    with torch.no_grad():
        for name, factor in (("linear1", scale), ("linear2", 1 / scale)):
            for n in range(4):
                tensors[f"encoder.layers.{n}.{name}.weight"].mul_(factor)
    erased = module.encoder.layers[3].dropout2
    (hook,) = erased._forward_hooks.values()
    hook.branch = 0.0
    advice = reasons(audit(module, plan))
    assert any(
        s.startswith("encoder.ffn_in carries") and "encoder.ffn_out lacks" in s for s in advice
    )
    assert any("beta of encoder.ffn in layer 4 is 0" in s for s in advice)
    assert not any("no common cause" in s for s in advice)


def test_a_module_that_was_never_initialised(built):
    """One sentence for all its matrices, whatever else would fit one of them."""
    module, _ = built
    plan = architecture_of(module).replace(biases=None).with_scheme("xavier")
    plan = plan.replace(weights=plan.weights.replace(query=0.5, key=0.6))
    sentences = [s for s in reasons(audit(module, plan)) if "unscaled" in s]
    assert sentences
    assert sentences[0].startswith(("query, key", "key, query", "token"))


# --- further ones ---------------------------------------------------------------------------------


def test_layernorm_scaling_lost(fresh):
    module, plan = fresh
    scaled = plan.replace(layernorm_scaling=True)
    report = audit(module, scaled)
    assert {f.quantity for f in report.offenders} == {"norm_output_scale"}
    assert {f.layer for f in report.offenders} == {2, 3}  # in layer 1 the factor is 1
    initialize(module, scaled)
    assert audit(module, scaled).passed


def test_a_shifted_layer_index(fresh):
    """value and output fall off as 1/l; counting from 0 would be infinite, from 2 is seen."""
    module, plan = fresh
    for number, (_, w) in enumerate(blocks(module, "value"), start=1):
        w.mul_(math.sqrt(number / (number + 1)))
    report = audit(module, plan)
    assert {f.role for f in report.offenders} == {"value"}


def test_gains_biases_and_broken_entries_are_named(fresh):
    module, plan = fresh
    found = anatomy_of(module).roles
    gain = found.named("ffn.norm.gain")[1]
    dict(module.named_parameters())[gain.parameter].data.mul_(1.5)
    name, w = blocks(module, "key")[0]
    w[0, 0] = math.nan
    report = audit(module, plan)
    assert gain.parameter in {f.parameter for f in report.offenders if f.quantity == "gain"}
    assert any(f.parameter == name and "not finite" in f.note for f in report.offenders)


def test_xaviers_rule_for_a_fused_matrix_is_of_queries_keys_and_values(fresh):
    module, plan = fresh
    for role, named in (("ffn_out", False), ("query", True)):
        initialize(module, plan)
        found = anatomy_of(module).roles.named(role)[0]
        for _, w in blocks(module, role):
            torch.nn.init.normal_(w, std=math.sqrt(2 / (found.fan_in + 3 * found.fan_out)))
        said = " ".join(reasons(audit(module, plan)))
        # torch draws in_proj_weight so itself
        assert ("one fused matrix" in said or "framework's own" in said) == named


def test_a_mean_that_is_not_zero(fresh):
    module, plan = fresh
    name, w = blocks(module, "ffn_in")[2]
    w.add_(0.3 * w.std())
    report = audit(module, plan)
    assert name in failed(report, "mean")


def test_what_the_report_shows(fresh):
    module, plan = fresh
    blocks(module, "value")[1][1].mul_(3)
    report = audit(module, plan)
    text = report.text(whole=True)
    assert "1 finding" in text.splitlines()[0]
    label = blocks(module, "value")[1][0]
    first = next(line for line in text.splitlines() if " out " in line)
    assert label.split(" [")[0] in first
    frame = report.to_frame()
    assert not frame.iloc[0]["passed"]
    assert frame.iloc[0]["parameter"] == label
    assert frame.iloc[0]["ratio"] == pytest.approx(9, rel=0.3)
    assert len(frame) == len(report.rows)
    assert repr(report).startswith("Report(")


def test_the_module_is_left_as_it_was(fresh):
    module, plan = fresh
    module.train()
    before = {name: p.clone() for name, p in module.named_parameters()}
    state = torch.random.get_rng_state()
    hooks = sum(len(p._forward_hooks) + len(p._forward_pre_hooks) for p in module.modules())
    audit(module, plan)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(part.training for part in module.modules())
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
    after = sum(len(p._forward_hooks) + len(p._forward_pre_hooks) for p in module.modules())
    assert after == hooks


def test_parameters_of_unknown_role_are_listed(fresh):
    module, plan = fresh
    module.extra = torch.nn.Linear(3, 3)
    report = audit(module, plan)
    assert "of unknown role: extra.weight, extra.bias" in report.unchecked
    assert report.passed
    assert "extra.weight" in str(report)


SCALED = {  # grouped and rotary; rotary in pairs, on a part; ALiBi in one fused matrix by heads
    "llama": lambda layer: layer.self_attn.q_proj.register_forward_hook(lambda *a: 1.01 * a[2]),
    "gptj": lambda layer: setattr(layer.attn, "scale_attn", layer.attn.scale_attn / 1.01),
    "bloom": lambda layer: setattr(
        layer.self_attention, "inv_norm_factor", 1.01 * layer.self_attention.inv_norm_factor
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_the_factor_on_q_k_is_measured_without_chance(kind):
    """One draw of four random tokens and more tells a hundredth, whatever turns or biases them."""
    module = small_modules.family_module(kind, 2, 48, seed=4)
    own = architecture_of(module)
    layers = [m for m in module.modules() if hasattr(m, "input_layernorm") or hasattr(m, "ln_1")]
    assert audit(module, own).passed
    SCALED[kind](layers[1])
    (offender,) = audit(module, own).offenders
    assert (offender.layer, offender.quantity) == (2, "temperature")
    assert offender.measured == pytest.approx(1 / 1.01, rel=1e-5)


def test_errors():
    module = encoder()
    plan = architecture_of(module)
    with pytest.raises(DomainError, match="layers of the plan = 4"):
        audit(module, plan.replace(layers=4))
    with pytest.raises(DomainError, match="plan"):
        audit(module, 3)
    with pytest.raises(DomainError, match="module"):
        audit("encoder", plan)
    with pytest.raises(MomentsError, match="no attention on a residual"):
        audit(torch.nn.Linear(2, 2), Transformer(1, 4, 2, 4))
    placed = audit(module, plan.replace(norm="post"))
    assert {f.quantity for f in placed.offenders} >= {"norm placement"}
    (sentence,) = [s for s in reasons(placed) if "'pre'" in s and "'post'" in s]
    assert "attention sum and ffn sum in every layer: the norm sits 'pre'" in sentence


# --- what was read is not kept --------------------------------------------------------------------


class Learned(torch.nn.Module):
    """A block whose factor on q k is a parameter."""

    def __init__(self):
        super().__init__()
        self.norm_a, self.norm_f = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        linear = torch.nn.Linear
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = linear(WIDTH, 96, bias=False), linear(96, WIDTH, bias=False)
        self.factor = torch.nn.Parameter(torch.tensor(WIDTH**-0.5))

    def forward(self, x):
        z = self.norm_a(x)
        weights = (self.factor * self.q(z) @ self.k(z).transpose(1, 2)).softmax(-1)
        x = x + self.o(weights @ self.v(z))
        return x + self.down(self.up(self.norm_f(x)).relu())


def test_an_audit_reads_the_entries_of_now():
    module = torch.nn.Sequential(torch.nn.Embedding(50, WIDTH), *(Learned() for _ in range(2)))
    plan = as_drawn(anatomy_of(module))
    initialize(module, plan)
    assert audit(module, plan).passed
    module[1].factor.data.mul_(4)
    (offender,) = audit(module, plan).offenders
    assert (offender.layer, offender.quantity) == (1, "temperature")
    assert offender.measured == pytest.approx(0.25)
    module[1].factor.data.div_(4)
    assert audit(module, plan).passed
    remembered = anatomy_of(module)
    assert anatomy_of(module) is remembered


def test_a_temperature_is_that_of_every_attention():
    module = small_modules.family_module("t5", 2, WIDTH)
    plan = architecture_of(module)
    plan = plan.replace(temperature=[2.0, 3.0], encoder=plan.encoder.replace(temperature=0.5))
    initialize(module, plan)
    scalings = {
        path: float(part.scaling)
        for path, part in module.named_modules()
        if path.endswith("Attention")
    }
    root = math.sqrt(WIDTH // 4)  # T5's own logits are q k alone
    assert scalings == {
        "encoder.block.0.layer.0.SelfAttention": pytest.approx(1 / (0.5 * root)),
        "encoder.block.1.layer.0.SelfAttention": pytest.approx(1 / (0.5 * root)),
        "decoder.block.0.layer.0.SelfAttention": pytest.approx(1 / (2 * root)),
        "decoder.block.0.layer.1.EncDecAttention": pytest.approx(1 / (2 * root)),
        "decoder.block.1.layer.0.SelfAttention": pytest.approx(1 / (3 * root)),
        "decoder.block.1.layer.1.EncDecAttention": pytest.approx(1 / (3 * root)),
    }
    assert audit(module, plan).passed
    module.decoder.block[1].layer[1].EncDecAttention.scaling *= 2
    (offender,) = audit(module, plan).offenders
    assert (offender.layer, offender.role, offender.quantity) == (2, "cross", "temperature")
