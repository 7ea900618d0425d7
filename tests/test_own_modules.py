"""A module of one's own, tried as its author would: recognised, audited, diagnosed."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moments
from moments import DomainError, Embedding, Head, Transformer, Weights

torch = pytest.importorskip("torch")

import nano_gpt  # noqa: E402

from moments.torch.anatomy import anatomy_of, as_drawn  # noqa: E402

CONFIG = nano_gpt.Config(n_layer=3)
SQUARE = nano_gpt.STD**2
LINEARS = ("query", "key", "value", "output", "ffn_in", "ffn_out")
PLAN = Transformer(
    layers=CONFIG.n_layer,
    d_model=CONFIG.n_embd,
    heads=CONFIG.n_head,
    seq_len=CONFIG.block_size,
    causal=True,
    activation="gelu",
    dropout=CONFIG.dropout,
    weights=Weights.normal(SQUARE, output_divisor=2 * CONFIG.n_layer),
    biases=moments.Biases.of(*LINEARS),
    norm_epsilon=1e-5,
    embedding=Embedding(CONFIG.vocab_size, SQUARE, SQUARE, dropout=CONFIG.dropout),
    head=Head(),
)
BATCH = nano_gpt.text(CONFIG)


@pytest.fixture(scope="module")
def drawn() -> Any:
    torch.manual_seed(0)
    return nano_gpt.GPT(CONFIG)


@pytest.fixture
def module(drawn: Any) -> Any:
    return copy.deepcopy(drawn)


def one_line(report: Any) -> str:
    return " ".join(str(report).split())


def headline(report: Any) -> str:
    """All but how to see the rest."""
    return " ".join(line.strip() for line in str(report).splitlines()[:-1])


# --- recognised -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bare", [False, True], ids=["dropout", "bare"])
def test_a_gpt_of_linear_layers_is_recognised(bare: bool) -> None:
    config = nano_gpt.Config(n_layer=2, bare=bare)
    module = nano_gpt.GPT(config)
    found = anatomy_of(module).roles
    assert not found.unidentified
    assert len(found.blocks) == 2 * config.n_layer
    (value,) = (r for r in found.named("value") if r.layer == 1)
    rows = module.transformer["h"][0].attn.c_attn.weight[2 * config.n_embd :]
    assert torch.equal(value.part.of(module.get_parameter(value.parameter)), rows)
    assert (value.fan_in, value.fan_out) == (config.n_embd, config.n_embd)
    plan = PLAN.replace(layers=2, weights=Weights.normal(SQUARE, output_divisor=4))
    if bare:
        plan = plan.replace(dropout=0.0, embedding=plan.embedding.replace(dropout=0.0))
    report = moments.torch.audit(module, plan)
    assert report.passed
    assert not report.unchecked
    first, read, *_ = str(report).splitlines()
    assert first == "GPT: nothing found wrong"
    assert f"{config.n_layer} layers of width 64, causal attention, Pre-LN" in read
    assert "4 heads" in read


def test_its_architecture_is_read_for_a_scheme(module: Any) -> None:
    read = as_drawn(anatomy_of(module))
    assert read is not None
    for name in ("layers", "d_model", "heads", "seq_len", "d_ff", "norm", "activation", "dropout"):
        assert getattr(read, name) == getattr(PLAN, name), name
    moments.torch.initialize(module, "xavier", seed=1)
    report = moments.torch.audit(module, "xavier")
    assert report.passed
    assert any("token, position" in words for words in report.unchecked)
    with pytest.raises(DomainError, match=r"moments\.Transformer\(layers=3, d_model=64, heads=4"):
        moments.torch.diagnose(module, BATCH)


def test_the_loss_beside_the_logits_is_the_modules_own(module: Any) -> None:
    seen = moments.torch.measure(module, BATCH)
    with torch.no_grad():
        logits, loss = module.eval()(**BATCH)
    assert seen.loss == pytest.approx(float(loss), rel=0.02)  # dropout
    assert seen.logit_variance == pytest.approx(float(logits.square().mean()), rel=0.1)


def test_query_key_and_value_scaled_instead_of_the_output(module: Any) -> None:
    """The stream hardly shows it, so the headline has to."""
    scale = 1 / math.sqrt(2 * CONFIG.n_layer)
    with torch.no_grad():
        for block in module.transformer["h"]:
            block.attn.c_attn.weight.mul_(scale)
            block.attn.c_proj.weight.div_(scale)
    words = "query and key and value carry the factor"
    assert words in one_line(moments.torch.audit(module, PLAN))
    diagnosis = moments.torch.diagnose(module, BATCH, PLAN)
    assert words in one_line(diagnosis)
    assert {"query", "key", "value", "output"} <= {found.kind for found in diagnosis.findings}
    assert diagnosis.findings[0].reason.startswith(words)


def test_a_depth_scale_that_counts_the_layer(module: Any) -> None:
    with torch.no_grad():
        for number, block in enumerate(module.transformer["h"], start=1):
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                linear.weight.mul_(math.sqrt(CONFIG.n_layer / number))
    words = "a scale 1/sqrt(2 l) that counts the layer l was applied for 1/sqrt(2 N)"
    (sentence,) = (f.reason for f in moments.torch.audit(module, PLAN).findings)
    assert sentence.startswith("output, ffn_out in layers 1 to 2")
    assert words in sentence
    diagnosis = moments.torch.diagnose(module, BATCH, PLAN)
    assert not diagnosis.expected
    ranked = [cause for cause in diagnosis.causes() if cause.explains > 0.05]
    assert {cause.kind for cause in ranked} == {"output", "ffn_out"}
    assert all(words in cause.reason for cause in ranked)


def test_a_residual_multiplier_that_counts_the_layer(module: Any) -> None:
    plan = PLAN.replace(branch_scale=1 / math.sqrt(2 * CONFIG.n_layer))
    wrong = plan.replace(branch_scale=[1 / math.sqrt(2 * n) for n in (1, 2, 3)])
    moments.torch.initialize(module, wrong)
    (sentence,) = (f.reason for f in moments.torch.audit(module, plan).findings)
    assert "a scale 1/sqrt(2 l) that counts the layer l was applied for" in sentence


# --- never reassured ------------------------------------------------------------------------------


def broken(module: Any) -> Any:
    """Attention's output doubled in one layer, a norm gone in another."""
    module.transformer["h"][0].attn.register_forward_hook(lambda part, given, output: 2 * output)
    module.transformer["h"][1].ln_1 = torch.nn.Identity()
    return module


def test_both_faults_are_found(module: Any) -> None:
    failed = {(f.layer, f.quantity) for f in moments.torch.audit(broken(module), PLAN).offenders}
    assert failed == {(1, "branch_scale"), (2, "norm placement")}


def test_a_norm_that_is_there_and_never_run(module: Any) -> None:
    block = module.transformer["h"][2]
    block.forward = lambda x: x + block.attn(x) + block.mlp(block.ln_2(x))
    report = moments.torch.audit(module, PLAN)
    failed = {(f.layer, f.role, f.quantity) for f in report.offenders}
    # Both blocks read x: what is left is also a sum of parallel blocks.
    assert failed == {(3, "attention sum", "norm placement"), (0, "parallel", "architecture")}
    assert "transformer.h.2.ln_1.weight" in str(report.unchecked)


def test_what_an_argument_is_called_decides_nothing(module: Any) -> None:
    """A token table 2500 times the declared variance, under `idx`, `input_ids` or no name."""

    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer, self.lm_head = module.transformer, module.lm_head

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return nano_gpt.GPT.forward(self, input_ids, labels)

    with torch.no_grad():
        module.transformer["wte"].weight.mul_(50)
    batch = {name: rows[:1, :12] for name, rows in BATCH.items()}
    renamed = {"input_ids": batch["idx"], "labels": batch["targets"]}
    found = [
        moments.torch.diagnose(module, batch, PLAN),
        moments.torch.diagnose(Renamed(), renamed, PLAN),
    ]
    for diagnosis in found:
        assert not diagnosis.expected
        assert diagnosis.causes()[0].kind == "embedding.token_variance"
        assert diagnosis.causes()[0].explains > 0.9
    texts = [str(one).partition(":")[2] for one in found]  # but for the class
    assert texts[0] == texts[1]


def test_what_was_measured_and_not_predicted_is_named(module: Any) -> None:
    silent = PLAN.replace(embedding=None, head=None)
    diagnosis = moments.torch.diagnose(module, BATCH, silent)
    assert diagnosis.expected
    assert "not checked" in headline(diagnosis)
    assert "the embedding (what enters layer 1 was measured" in headline(diagnosis)
    assert "head and loss" in headline(diagnosis)


def test_what_attention_is_told_to_multiply_by(module: Any) -> None:
    """A wrong number of heads divides logits by another root."""
    module.transformer["h"][1].attn.n_head = 1
    (offender,) = moments.torch.audit(module, PLAN).offenders
    assert (offender.layer, offender.quantity) == (2, "temperature")
    assert offender.measured == pytest.approx(math.sqrt(CONFIG.n_head))


# --- wrapped --------------------------------------------------------------------------------------


def test_compiled_modules_are_audited_and_measured_as_what_they_hold(module: Any) -> None:
    """The whole, its layers alone, or in place; nothing is compiled for it."""
    text = str(moments.torch.audit(module, PLAN))
    moved = torch.nn.DataParallel(torch.compile(module, backend=refuse))
    assert str(moments.torch.audit(moved, PLAN)) == text
    layers = copy.deepcopy(module)
    for n, block in enumerate(layers.transformer["h"]):
        layers.transformer["h"][n] = torch.compile(block, backend=refuse)
    assert headline(moments.torch.audit(layers, PLAN)).startswith("GPT: nothing found wrong")
    inside = copy.deepcopy(module)
    inside.compile(backend=refuse)
    assert str(moments.torch.audit(inside, PLAN)) == text
    plain = moments.torch.measure(module, BATCH)
    for other in (moved, layers, inside):
        np.testing.assert_array_equal(moments.torch.measure(other, BATCH).variance, plain.variance)
    assert moments.torch.describe(moved, architecture=PLAN) == moments.torch.describe(
        module, architecture=PLAN
    )


def refuse(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled")


@pytest.fixture
def alone() -> Iterator[Any]:
    """A process group of this process."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield distributed
    distributed.destroy_process_group()


def test_distributed_modules_are_unwrapped_or_refused(module: Any, alone: Any) -> None:
    data_parallel = torch.nn.parallel.DistributedDataParallel(module)
    assert moments.torch.audit(data_parallel, PLAN).passed
    whole = copy.deepcopy(module)
    mesh = alone.device_mesh.init_device_mesh("cpu", (1,))
    alone.fsdp.fully_shard(whole, mesh=mesh)
    for use in (moments.torch.audit, moments.torch.initialize):
        with pytest.raises(DomainError, match=r"transformer\.wte\.weight is a shard"):
            use(whole, PLAN)
    flat = copy.deepcopy(module)
    flat.transformer["wte"].weight.data = flat.transformer["wte"].weight.data.flatten()
    with pytest.raises(DomainError, match="is a shard"):
        moments.torch.audit(flat, PLAN)


# --- read without a family ------------------------------------------------------------------------


class Root(torch.nn.Module):
    """RMSNorm of one's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True))


class Layer(torch.nn.Module):
    """Separate matrices, a gate, and norms before or behind its blocks."""

    def __init__(self, width: int, pre: bool) -> None:
        super().__init__()
        self.pre = pre
        self.n2, self.n1 = Root(width), Root(width)  # not in the order in which they act
        sizes = {"wv": 1, "wq": 1, "wo": 1, "wk": 1, "up": 3, "gate": 3}
        self.m = torch.nn.ModuleDict(
            {n: torch.nn.Linear(width, k * width, bias=False) for n, k in sizes.items()}
        )
        self.down = torch.nn.Linear(3 * width, width, bias=False)

    def attend(self, x: Any) -> Any:
        q, k, v = (self.m[n](x).unflatten(-1, (4, -1)).transpose(1, 2) for n in ("wq", "wk", "wv"))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.m["wo"](mixed.transpose(1, 2).flatten(2))

    def feed(self, x: Any) -> Any:
        return self.down(torch.nn.functional.silu(self.m["gate"](x)) * self.m["up"](x))

    def forward(self, x: Any) -> Any:
        if self.pre:
            x = x + self.attend(self.n1(x))
            return x + self.feed(self.n2(x))
        x = self.n1(x + self.attend(x))
        return self.n2(x + self.feed(x))


class Decoder(torch.nn.Module):
    def __init__(self, pre: bool = True, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(53, width)
        self.stack = torch.nn.ModuleList(Layer(width, pre) for _ in range(layers))
        self.end, self.logits = Root(width), torch.nn.Linear(width, 53, bias=False)
        self.rope = torch.nn.Parameter(torch.zeros(3))

    def forward(self, tokens: Any) -> Any:
        x = self.words(tokens)
        for layer in self.stack:
            x = layer(x)
        return self.logits(self.end(x))


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_a_module_that_no_family_knows_is_read(pre: bool) -> None:
    torch.manual_seed(3)
    module = Decoder(pre)
    found = moments.torch.describe(module)
    roles = {(r.layer, r.parameter): r.name for named in found.roles.values() for r in named}
    for number in (1, 2, 3):
        own = {k.split(".", 2)[2]: v for (n, k), v in roles.items() if n == number}
        assert own == {
            "m.wq.weight": "query",
            "m.wk.weight": "key",
            "m.wv.weight": "value",
            "m.wo.weight": "output",
            "m.up.weight": "ffn_in",
            "m.gate.weight": "gate",
            "down.weight": "ffn_out",
            "n1.weight": "attention.norm.gain",
            "n2.weight": "ffn.norm.gain",
        }
    assert {k: v for (n, k), v in roles.items() if n in (0, 4)} == {
        "words.weight": "token",
        "end.weight": "final.norm.gain",
        "logits.weight": "head",
    }
    assert found.unplaced == ("rope: no role is known",)
    plan = Transformer(
        3,
        32,
        4,
        16,
        d_ff=96,
        causal=True,
        norm="pre" if pre else "post",
        normalization="rmsnorm",
        activation="silu",
        gated=True,
        norm_affine=True,
        weights=Weights.torch_default(32, 96).replace(gate=1 / 96),
    )
    ids = torch.randint(53, (2, 16), generator=torch.Generator().manual_seed(0))
    report = moments.torch.audit(module, plan, batch=ids)
    assert report.passed, str(report)
    assert not any("norm placement" in words for words in report.unchecked)
    module.stack[1].down.register_forward_hook(lambda part, inputs, output: 0.5 * output)
    module.stack[2].n1.forward = lambda x: 3 * x
    report = moments.torch.audit(module, plan, batch=ids)
    assert {f.layer for f in report.offenders} >= {2, 3}


class Closed(Decoder):
    """One that nobody can run who does not know its word."""

    def forward(self, tokens: Any, *, word: int) -> Any:
        return super().forward(tokens)


def test_a_module_that_cannot_be_run_is_refused_with_the_reason() -> None:
    module, ids = Closed(), torch.zeros(1, 8, dtype=torch.long)
    plan = Transformer(3, 32, 4, 16)
    for use in (
        lambda: moments.torch.audit(module, plan),
        lambda: moments.torch.initialize(module, plan),
        lambda: moments.torch.diagnose(module, ids, plan),
    ):
        with pytest.raises(moments.MomentsError, match="Closed could not be run") as refusal:
            use()
        assert "missing 1 required keyword-only argument: 'word'" in str(refusal.value)


def test_a_norm_that_stands_behind_a_reshape_is_seen() -> None:
    """OPT's second norm takes rows without their sequences."""
    pytest.importorskip("transformers")
    import small_modules

    points = moments.torch.hook_points(small_modules.family_module("opt", 2, 64))
    assert (1, "ffn.norm", "model.decoder.layers.0.final_layer_norm", "output") in points


def test_a_norm_of_a_blocks_output_is_no_post_norm() -> None:
    module = Decoder(pre=False)
    for layer in module.stack:
        layer.forward = functools.partial(branch_normed, layer)
    found = moments.torch.describe(module)
    assert found.model is not None
    assert found.model.norm == "output"
    (gain,) = found.roles["stack.0.n1.weight"]
    assert (gain.layer, gain.name) == (1, "attention.post_norm.gain")
    assert (1, "attention.post_norm", "stack.0.n1", "output") in found.sites


def branch_normed(layer: Any, x: Any) -> Any:
    x = x + layer.n1(layer.attend(x))
    return x + layer.n2(layer.feed(x))


# --- as they come ---------------------------------------------------------------------------------


def frozen(module: Any) -> None:
    module.requires_grad_(False)


def never_drawn(module: Any) -> None:
    """Storage as `to_empty` may give it."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()


def zero_outputs(module: Any) -> None:
    with torch.no_grad():
        for block in module.transformer["h"]:
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()


@pytest.mark.parametrize("change", [frozen, never_drawn, zero_outputs])
def test_what_a_module_held_before_is_written_over(module: Any, change: Any) -> None:
    change(module)
    moments.torch.initialize(module, PLAN, seed=3)
    report = moments.torch.audit(module, PLAN)
    assert report.passed, str(report)
    assert not report.unchecked
    assert {p.requires_grad for p in module.parameters()} == {change is not frozen}


def test_shared_matrices_are_named(module: Any) -> None:
    layers = module.transformer["h"]
    layers[1].mlp.c_fc.weight = layers[0].mlp.c_fc.weight
    with pytest.raises(DomainError, match=r"ffn_in .* in layer 2 \(transformer\.h\.0\.mlp\.c_fc"):
        moments.torch.initialize(module, PLAN)
    layers[1] = layers[0]
    with pytest.raises(DomainError, match=r"h\.1\.attn\.c_attn\.weight is transformer\.h\.0\.attn"):
        moments.torch.initialize(module, PLAN)
    other = Decoder()
    for layer in other.stack:
        layer.m["wk"].weight = layer.m["wq"].weight
    with pytest.raises(DomainError, match=r"stack\.0\.m\.wk\.weight is stack\.0\.m\.wq\.weight"):
        moments.torch.initialize(other, "xavier")


class Adapted(torch.nn.Module):
    """A matrix with one of low rank beside it."""

    def __init__(self, base: Any, zero: bool) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(0.1 * torch.randn(4, base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, 4))
        if not zero:
            torch.nn.init.normal_(self.up, std=0.1)

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_adapters_are_left_or_refused() -> None:
    for zero in (True, False):
        module = Decoder()
        for layer in module.stack:
            layer.down = Adapted(layer.down, zero)
        if zero:
            done = moments.torch.initialize(module, "xavier")
            assert {"stack.0.down.down", "stack.2.down.up"} <= set(done.left)
            report = moments.torch.audit(module, "xavier")
            assert report.passed
            assert any("unknown role" in words for words in report.unchecked)
        else:
            with pytest.raises(DomainError, match=r"could not be read \(.*stack\.\*\.down\.down"):
                moments.torch.initialize(module, "xavier")


def test_an_audit_without_a_plan(module: Any) -> None:
    with pytest.raises(DomainError, match="nothing in GPT says how it is meant to be drawn"):
        moments.torch.audit(module)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    report = moments.torch.audit(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    assert report.passed, str(report)
    assert "1 layer of width 32, full attention, Pre-LN" in headline(report)
