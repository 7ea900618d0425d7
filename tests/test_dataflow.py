"""A module read from one pass: by what it computes, whatever its parts are called."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments import Transformer, ValidityWarning

torch = pytest.importorskip("torch")

import foreign_modules  # noqa: E402
import nano_gpt  # noqa: E402
import own_styles  # noqa: E402
from foreign_modules import UNREAD  # noqa: E402

from moments.model.huggingface import FAMILIES  # noqa: E402
from moments.torch.anatomy import anatomy_of, as_drawn  # noqa: E402
from moments.torch.dataflow import read  # noqa: E402
from moments.torch.dataflow.graph import record  # noqa: E402
from moments.torch.roles import tensors_of  # noqa: E402

nn = torch.nn
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What small weights break of the theory is said of every one of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        yield


def built(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return own_styles.STYLES[name]()


def fields(model: Transformer | None) -> dict[str, Any]:
    """Every field as what it holds, defaults resolved."""
    assert model is not None
    found = {}
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if field.name == "encoder" and value is not None:
            found |= {f"encoder.{name}": held for name, held in fields(value).items()}
        elif hasattr(value, "to_dict"):
            found |= {f"{field.name}.{name}": held for name, held in value.to_dict().items()}
        elif field.init:
            found[field.name] = value
    return found


# --- each checks the other ------------------------------------------------------------------------

REAL = {
    # A family's declaration says what was meant; the dataflow what the tables hold.
    "t5": ("relative_bias.variance", "encoder.relative_bias.variance", "encoder.embedding.token"),
    "mt5": ("relative_bias.variance", "encoder.relative_bias.variance", "encoder.embedding.token"),
}
NO_EFFECT = ("embedding.positions", "encoder.embedding.positions", "name", "encoder.name")


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_the_dataflow_reads_what_the_family_says(kind: str) -> None:
    """A role for every parameter, and every field of the declaration."""
    pytest.importorskip("transformers")
    import small_modules

    module = small_modules.family_module(kind, 2, 64)
    found = read(module)
    assert found.reasons == ()
    assert found.doubts == ()
    assert found.roles.unidentified == ()
    ours, theirs = fields(found.model), fields(moments.torch.describe(module).model)
    for name in theirs:
        if name.startswith(REAL.get(kind, ())) or name in NO_EFFECT:
            continue
        if ours[name] == theirs[name]:
            continue
        try:
            assert np.allclose(np.asarray(ours[name], float), np.asarray(theirs[name], float)), name
        except (TypeError, ValueError):
            pytest.fail(f"{name}: {ours[name]} read, {theirs[name]} declared")


# --- as people write them -------------------------------------------------------------------------

GPT = {"layers": 2, "d_model": 64, "heads": 4, "d_head": 16, "causal": True, "norm": "pre"}
ROOTS = GPT | {"normalization": "rmsnorm", "gated": True, "d_ff": 192}
EXPECTED: dict[str, dict[str, Any]] = {
    "minGPT": GPT | {"d_ff": 256, "activation": "gelu_tanh", "dropout": 0.1, "seq_len": 24},
    "lecture": GPT | {"activation": "relu", "attention_dropout": 0.2, "head.bias": True},
    "lit-gpt": ROOTS
    | {"activation": "silu", "kv_heads": 2, "rotary.fraction": 0.5, "norm_epsilon": 1e-5},
    "lit-gpt, parallel": ROOTS | {"parallel": True, "parallel_norms": 1, "kv_heads": 1},
    "torchtitan": ROOTS | {"activation": "silu", "rotary.base": 500000.0, "kv_heads": 2},
    "torchtune": ROOTS
    | {"activation": "gelu_tanh", "qk_norm": "rmsnorm", "embedding.scale": 8.0, "head.tied": True},
    "torchtune, scaled": ROOTS | {"qk_norm": None, "branch_scale": 0.3},
    "timm": {"norm": "pre", "causal": False, "seq_len": 17, "head.classes": 10}
    | {"embedding.patch_size": 8, "embedding.dropout": 0.1, "temperature": 1.0},
    "timm, scaled": {"branch_scale": 0.1, "head.loss": "classification", "head.pool": "first"},
    "bare": GPT | {"d_ff": 128, "activation": "silu", "norm_affine": False, "head.tied": True},
    "bare, post": GPT | {"norm": "post", "biases": None, "head.norm": False},
}


@pytest.mark.parametrize("name", sorted(own_styles.STYLES))
def test_a_style_is_read(name: str) -> None:
    module = built(name)
    found = read(module)
    assert found.reasons == ()
    assert found.roles.unidentified == ()
    held = fields(found.model)
    for field, value in EXPECTED[name].items():
        assert held[field] == (pytest.approx(value) if isinstance(value, float) else value), field
    assert len(found.roles.blocks) == (0 if name.startswith("bare") else 4)


def test_every_name_plays_its_part() -> None:
    found = read(built("torchtune"))
    roles = {(r.parameter, r.name) for r in found.roles.roles if r.layer == 2}
    at = "layers.1."
    assert roles == {
        (f"{at}q_proj.weight", "query"),
        (f"{at}k_proj.weight", "key"),
        (f"{at}v_proj.weight", "value"),
        (f"{at}output_proj.weight", "output"),
        (f"{at}q_norm.weight", "query.norm.gain"),
        (f"{at}k_norm.weight", "key.norm.gain"),
        (f"{at}sa_norm.weight", "attention.norm.gain"),
        (f"{at}mlp_norm.weight", "ffn.norm.gain"),
        (f"{at}w.weight", "gate"),
        (f"{at}w.weight", "ffn_in"),
        (f"{at}down.weight", "ffn_out"),
    }


def test_heads_side_by_side_and_in_turn_within_one_matrix() -> None:
    """lit-gpt keeps a group's queries beside its key and value."""
    module = built("lit-gpt")
    (query,) = (r for r in read(module).roles.named("query") if r.layer == 1)
    rows = torch.arange(128).view(2, 4, 16)  # group, two queries and a key and a value, feature
    weight = module.transformer["h"][0].attn.attn.weight
    assert torch.equal(query.part.of(weight).reshape(-1, 64), weight[rows[:, :2].flatten()])
    (gain,) = (r for r in read(module).roles.named("ffn.norm.gain") if r.layer == 1)
    assert gain.unit is False  # stored less one


def test_a_list_of_heads_is_one_matrix_in_parts() -> None:
    module = built("lecture")
    found = read(module)
    first = [r for r in found.roles.named("query") if r.layer == 1]
    assert len(first) == 4
    squares = [float(module.get_parameter(r.parameter).detach().square().mean()) for r in first]
    assert found.model is not None
    assert found.model.layer_weights(1).query == pytest.approx(np.mean(squares))


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_torchs_own_stacks(pre: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=pre, batch_first=False)
    encoder = read(nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False))
    assert encoder.model is not None
    assert (encoder.model.norm, encoder.model.causal) == ("pre" if pre else "post", False)
    decoder = nn.TransformerDecoderLayer(32, 4, 64, norm_first=pre, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    given = {"tgt": torch.randn(2, 9, 32), "memory": torch.randn(2, 9, 32), "tgt_mask": mask}
    found = read(nn.TransformerDecoder(decoder, 2), given)
    assert found.model is not None
    assert found.model.causal
    assert found.roles.unidentified == ()
    assert [b.name for b in found.roles.blocks] == ["attention", "cross", "ffn"] * 2


@pytest.mark.parametrize("name", sorted(foreign_modules.X_TRANSFORMERS))
def test_x_transformers(name: str) -> None:
    pytest.importorskip("x_transformers")
    found = read(foreign_modules.x_transformer(name))
    expected = foreign_modules.X_TRANSFORMERS[name][1]
    assert found.reasons == ()
    assert found.roles.unidentified == ()
    held = fields(found.model)
    assert {name: held[name] for name in expected} == expected
    assert len(found.roles.blocks) == 4


@pytest.mark.parametrize("kind", sorted(UNREAD))
def test_types_without_a_reader(kind: str) -> None:
    pytest.importorskip("transformers")
    found = read(foreign_modules.unread(kind))
    expected = UNREAD[kind][2]
    assert found.reasons == ()
    assert found.roles.unidentified == ()
    held = fields(found.model)
    assert {name: held[name] for name in expected} == expected


# --- what it cannot say, it says it cannot --------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("diffllama", "something acts between an attention's heads and its output"),
        ("albert", "layers that share their weights"),
    ],
)
def test_what_no_transformer_says_is_named(kind: str, reason: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 101, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CONFIG_MAPPING[kind](**sizes | special, embedding_size=64)
    auto = "AutoModelForMaskedLM" if kind == "albert" else "AutoModelForCausalLM"
    found = moments.torch.describe(getattr(transformers, auto).from_config(config))
    assert found.model is None
    assert any(words.startswith(reason) for words in found.unplaced), found.unplaced
    assert "nothing that moments.Transformer declares" in str(found)


def test_a_module_without_attention_is_refused() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with pytest.raises(moments.MomentsError, match="no attention on a residual stream"):
        read(module)
    with pytest.raises(moments.MomentsError, match=r"could not be run .*: pass batch="):
        read(nn.Bilinear(3, 4, 5))


def test_a_parameter_that_nothing_uses_is_named() -> None:
    module = built("minGPT")
    module.spare = nn.Parameter(torch.ones(3))
    found = moments.torch.describe(module)
    assert found.unplaced == ("spare: no role is known",)
    assert found.roles["spare"] == ()
    assert found.model is not None


# --- one interface --------------------------------------------------------------------------------


def test_description() -> None:
    module = built("lit-gpt")
    found = moments.torch.describe(module)
    (query, key, value) = found.roles["transformer.h.1.attn.attn.weight"]
    assert (str(query), str(key), str(value)) == (
        "query of layer 2",
        "key of layer 2",
        "value of layer 2",
    )
    assert '"transformer.h.{layer}.attn.attn.weight": "query+key+value"' in str(found)
    frame = found.to_frame().set_index("parameter")
    row = frame.loc["transformer.h.0.mlp.proj.weight"]
    assert (row["role"], row["layer"], row["fan_in"], row["fan_out"]) == ("ffn_out", 1, 192, 64)
    held = module.transformer["h"][0].mlp["proj"].weight.detach().double().square().mean()
    assert row["variance"] == pytest.approx(float(held))


def test_a_style_is_measured_audited_and_initialised() -> None:
    module, ids = built("torchtitan"), torch.randint(97, (2, 24))
    measured = moments.torch.measure(module, ids)
    assert len(measured.variance) == 3
    weights = measured.weight_gradients()
    assert {"query", "gate", "token", "head"} <= set(weights["weight"])
    moments.torch.initialize(module, "xavier", seed=3)
    report = moments.torch.audit(module, "xavier")
    assert report.passed
    assert len(report.rows) > 40
    with torch.no_grad():
        module.layers["1"].attention.wo.weight.mul_(1.3)
    (worst, *_) = moments.torch.audit(module, "xavier").offenders
    assert worst.parameter == "layers.1.attention.wo.weight"


def test_scales_and_dropouts_are_carried_into_any_module() -> None:
    module = built("minGPT")
    plan = as_drawn(anatomy_of(module))
    assert plan is not None
    plan = plan.replace(skip_scale=0.8, branch_scale=0.5)
    moments.torch.initialize(module, plan)
    report = moments.torch.audit(module, plan)
    assert report.passed
    assert {f.quantity for f in report.rows} >= {"skip_scale", "branch_scale", "temperature"}
    found = read(module)
    assert found.model is not None
    assert found.model.skip_scale == pytest.approx(0.8)
    assert found.model.branch_scale == pytest.approx(0.5)


def test_a_reading_follows_the_module() -> None:
    """What was read before is not kept when a part, a setting or a hook changes."""
    module = built("minGPT")
    assert anatomy_of(module) is anatomy_of(module)
    module.blocks[0].ln1 = nn.Identity()
    reading = anatomy_of(module)
    assert reading is not None
    assert reading.unnormed == ((1, "attention"),)


def test_a_missing_norm_of_an_encoder_is_none_of_its_decoder() -> None:
    pytest.importorskip("transformers")
    import small_modules

    module = small_modules.family_module("t5", 4, 64)
    module.encoder.block[0].layer[0].layer_norm = nn.Identity()
    reading = read(module)
    assert reading.unnormed == ((1, "attention"),)
    placements = {
        stack: reading.sums[stack, 1, "attention"].placement for stack in ("", "encoder.")
    }
    assert placements == {"": "pre", "encoder.": "none"}


def test_a_pass_leaves_the_module_as_it_was() -> None:
    module = built("timm")
    module.register_buffer("count", torch.zeros(()))
    module.register_forward_pre_hook(lambda part, given: part.count.add_(1) and None)
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    module.eval()
    read(module)
    assert not module.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# --- the graph ------------------------------------------------------------------------------------


class Memory(nn.Module):
    """Writes through views of one memory, as caches and rotations in place do."""

    def forward(self, x: Any) -> Any:
        y = torch.zeros(x.shape[0], 4, x.shape[1])
        y[:, 1] = x
        row = y[:, 1]
        y[:, 1, 0] += 1
        first = row.sum(-1)
        y[:, 3] = 2 * row
        return first[:, None, None] + y


def test_memory_written_through_views_is_followed() -> None:
    module, x, other = Memory(), torch.randn(3, 5), torch.randn(3, 5)
    graph = record(module, lambda: module(x), {"x": x})
    (again,) = graph.run(
        {graph.values.index(next(v for v in graph.values if v.live)): other}, graph.outputs
    )
    assert torch.equal(again, module(other))
    assert torch.equal(graph.tensor(graph.outputs), module(x))


def test_a_recorded_pass_runs_again_on_other_input() -> None:
    """Bit by bit what the module gives without dropout."""
    module = nano_gpt.GPT(n_layer=2)
    one, other = (nano_gpt.text(module.config, seed=s)["idx"] for s in (1, 2))
    graph = record(module.train(), lambda: module(one, one), {"idx": one})
    start = next(n for n, value in enumerate(graph.values) if value.name == "idx")
    (loss,) = graph.run({start: other}, graph.outputs[1])
    with torch.no_grad():
        assert float(loss) != float(graph.tensor(graph.outputs[1]))
        assert float(loss) == pytest.approx(float(module.eval()(other, other)[1]), rel=1e-6)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-12, 0.0])
def test_a_norms_epsilon_is_seen_in_how_it_treats_small_input(epsilon: float) -> None:
    module = built("torchtitan")
    for part in module.modules():
        if isinstance(part, nn.RMSNorm):
            part.eps = epsilon
    found = read(module)
    assert found.model is not None
    assert found.model.norm_epsilon == pytest.approx(epsilon, rel=0.02, abs=1e-15)
    assert math.isfinite(found.model.norm_epsilon)


def test_a_window_is_seen_at_the_batchs_own_length() -> None:
    pytest.importorskip("transformers")
    import small_modules

    module = small_modules.family_module("mistral", 2, 64, sliding_window=20)
    found = read(module, torch.randint(5, 101, (3, 32)))
    assert found.model is not None
    assert (found.model.window, found.model.seq_len) == (20, 32)


# --- precision, and adapters ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("timm", torch.float16), ("minGPT", torch.bfloat16)])
def test_a_module_in_half_precision_is_read_as_in_single(name: str, kind: Any) -> None:
    module = built(name).to(kind)
    before = {n: t.clone() for n, t in tensors_of(module).items()}
    found, wanted = read(module), read(built(name))
    one, other = fields(found.model), fields(wanted.model)
    for key, value in other.items():
        if isinstance(value, float | tuple | list):
            assert one[key] == pytest.approx(value, rel=0.01), key
        else:
            assert one[key] == value, key
    assert found.roles.roles == wanted.roles.roles
    assert found.sites == wanted.sites
    assert all(torch.equal(t, before[n]) for n, t in tensors_of(module).items())
    module(found.example)  # which it takes as it is
    assert {p.dtype for p in module.parameters()} == {kind}


class Adapted(nn.Module):
    """A matrix and, beside it, two narrow ones, as adapters are added before fine-tuning."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Any) -> Any:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


@pytest.mark.parametrize("name", ["minGPT", "torchtune"])
def test_adapters_that_add_nothing_yet_are_set_aside(name: str) -> None:
    wanted, module = read(built(name)), built(name)
    inner = [(p, m) for p, m in module.named_modules() if isinstance(m, nn.Linear) and "." in p]
    for path, matrix in inner:
        owner, _, last = path.rpartition(".")
        setattr(module.get_submodule(owner), last, Adapted(matrix))
    assert len(inner) > 3
    found = read(module)
    assert fields(found.model) == fields(wanted.model)
    names = {r.parameter.replace(".base.", "."): r for r in found.roles.roles}
    assert names.keys() == {r.parameter for r in wanted.roles.roles}
    assert {n for n in found.roles.unidentified if ".base." not in n} >= {
        f"{path}.{part}.weight" for path, _ in inner for part in ("down", "up")
    }
    assert any("adapters" in doubt for doubt in found.doubts)
    with torch.no_grad():
        for _, part in module.named_modules():
            if isinstance(part, Adapted):
                part.up.weight.normal_(0, 0.1)
    assert read(module).model is None


class Whole(nn.Module):
    """A matrix as whole numbers and a factor."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.step = float(base.weight.detach().abs().max()) / 127
        self.register_buffer("numbers", (base.weight.detach() / self.step).round().to(torch.int8))

    def forward(self, x: Any) -> Any:
        return x @ (self.step * self.numbers.to(x.dtype)).T


class Routed(nn.Module):
    """Every token through the one of two blocks that it chooses."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.choice = nn.Linear(own_styles.WIDTH, 2, bias=False)
        self.experts = nn.ModuleList([base, copy.deepcopy(base)])

    def forward(self, x: Any) -> Any:
        rows = x.flatten(0, 1)
        best, made = self.choice(rows).argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (taken,) = torch.where(best == number)
            made = made.index_add(0, taken, expert(rows[taken]))
        return made.view_as(x)


def test_a_refusal_says_what_makes_a_module_unreadable() -> None:
    module = built("minGPT")
    for path, matrix in list(module.named_modules()):
        if isinstance(matrix, nn.Linear) and "." in path:
            owner, _, last = path.rpartition(".")
            setattr(module.get_submodule(owner), last, Whole(matrix))
    with pytest.raises(moments.MomentsError, match="integers: pass the module before it is quant"):
        read(module)
    module = built("torchtitan")
    for layer in module.layers.values():
        layer.feed_forward = Routed(layer.feed_forward)
    (reason, *_) = moments.torch.describe(module).unplaced
    assert reason.startswith("a feed-forward block of 7 matrices (layers.*.feed_forward.choice")


# --- modules without storage ----------------------------------------------------------------------


def test_a_module_on_the_meta_device_is_described_as_it_would_be_drawn() -> None:
    with torch.device("meta"):
        module = own_styles.TitanGPT()
    found = moments.torch.describe(module)
    assert next(module.parameters()).is_meta
    assert found.model is not None
    assert found.model.kv_heads == 2
    assert found.model.layer_weights(1).query == pytest.approx(1 / (3 * 64), rel=0.05)
    assert any("freqs_cis" in note for note in found.notes)
    assert any("a constructor may draw others" in note for note in found.notes)


def test_a_module_of_transformers_on_the_meta_device() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        module = foreign_modules.unread("gpt_bigcode")
    model = moments.torch.describe(module).model
    assert model is not None
    assert (model.causal, model.kv_heads) == (True, 1)
    assert model.layer_weights(1).output == pytest.approx(0.02**2 / 4, rel=0.1)
    assert model.head is not None
    assert model.head.tied


# --- and what is predicted of the description is what the module does -----------------------------

STORED = json.loads((BENCHMARKS / "data/dataflow.json").read_text(encoding="utf-8"))
BOUNDS = {"variance": 0.02, "correlation": 0.02, "grad_variance": 0.06, "loss": 0.01}


@pytest.mark.parametrize("kind", sorted(STORED))
def test_stored_measurements_agree(kind: str) -> None:
    """Of `python benchmarks/dataflow.py measure`, beyond twice the standard error."""
    assert STORED[kind]["seeds"] >= 8
    for name, bound in BOUNDS.items():
        if name in STORED[kind]:
            mean, stderr = (np.array(STORED[kind][name][part]) for part in ("mean", "stderr"))
            assert np.all(np.abs(mean) <= bound + 2 * stderr), name
            assert mean.shape == ((1,) if name == "loss" else (3,))


def test_a_foreign_module_is_checked_and_diagnosed() -> None:
    """Through the same calls as a known one."""
    module, ids = built("torchtitan"), torch.randint(97, (4, 24))
    assert moments.check(module, ids).healthy
    model = read(module, ids).model
    with torch.no_grad():
        module.layers["1"].feed_forward.w2.weight.mul_(3)
    diagnosis = moments.torch.diagnose(module, ids, model)
    assert not diagnosis.expected
    assert diagnosis.causes()[0].kind == "ffn_out"


@pytest.mark.parametrize("kind", ["electra", "opt"])
def test_the_matrix_that_widens_narrower_tables(kind: str) -> None:
    """Described as its config declares it, within the sampling error of its entries; one drawn too
    large is named by the audit."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    more = {
        "electra": {"embedding_size": 32, "intermediate_size": 256},
        "opt": {"word_embed_proj_dim": 32, "ffn_dim": 256, "do_layer_norm_before": False},
    }[kind]
    config = transformers.CONFIG_MAPPING[kind](**sizes, **more, max_position_embeddings=24)
    name = {"electra": "ElectraForMaskedLM", "opt": "OPTForCausalLM"}[kind]
    torch.manual_seed(0)
    module = getattr(transformers, name)(config)
    reading = read(module)
    declared = moments.from_huggingface(config)
    assert not reading.reasons + reading.doubts + reading.roles.unidentified
    for part in ("embedding", "head"):
        ours, theirs = getattr(reading.model, part), getattr(declared, part)
        assert ours.factor_dim == theirs.factor_dim == 32
        if theirs.factor_variance is not None:
            assert ours.factor_variance == pytest.approx(theirs.factor_variance, rel=0.1)
    assert reading.model.embedding.factor_bias == declared.embedding.factor_bias
    assert moments.torch.audit(module, declared).passed
    wide = {role.name: role.parameter for role in reading.roles.roles}["factor"]
    with torch.no_grad():
        module.get_parameter(wide).mul_(2)
    assert wide in str(moments.torch.audit(module, declared))


class SinkAttention(nn.Module):
    """Attention over keys and, as GPT-OSS has it, a logit of every head behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
        self.sinks = nn.Parameter(0.5 * torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, 16).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) / 4
        logits = logits.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
        sinks = self.sinks.view(1, 4, 1, 1).expand(b, 4, t, 1)
        weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, 64))


class SinkLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.n1, self.n2 = SinkAttention(), nn.RMSNorm(64), nn.RMSNorm(64)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


def test_sinks_behind_the_keys_are_read_drawn_and_audited() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(90, 64), SinkLayer(), SinkLayer(), nn.RMSNorm(64))
    seen = moments.torch.describe(module)
    sinks = [layer.attn.sinks for layer in module[1:3]]
    wanted = [float(one.detach().square().mean()) for one in sinks]
    assert seen.model.attention_sinks == pytest.approx(wanted, rel=1e-5)
    assert seen.model.causal
    plan = moments.solve(seen.model.replace(attention_sink=4.0), "xavier")
    moments.torch.initialize(module, plan)
    assert moments.torch.audit(module, plan).passed
    with torch.no_grad():
        sinks[1].mul_(3.0)
    assert not moments.torch.audit(module, plan).passed
