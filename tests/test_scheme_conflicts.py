"""Schemes warn where they clash, and only there."""

from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

import moments
from moments.scheme import Scheme, registry, schemes

LNS = {"layernorm_scaling": True}


def model(**changes: Any) -> moments.Transformer:
    fields = {"layers": 8, "d_model": 128, "heads": 1, "seq_len": 32}
    return moments.Transformer(**{**fields, **changes})


CLASHES: list[tuple[moments.Transformer, str, dict[str, Any], str]] = [
    (model().with_scheme("scaled-init"), "lns", {}, "worse than LayerNorm Scaling alone.*Table 6"),
    (model(**LNS), "scaled-init", {}, "worse than LayerNorm Scaling alone"),
    (model(norm="post"), "lns", {}, "was Post-LN"),
    (model().with_scheme("layerscale"), "lns", {}, "remove LayerScale"),
    (model(**LNS), "layerscale", {}, "remove LayerScale"),
    (model(), "lns", {"position": "after-residual"}, "diverges"),
    (model(norm="post"), "scaled-init", {}, "does not grow"),
    (model(), "deepnorm", {"embedding": True}, "not to the embedding"),
    (model(), "deepnorm", {"matrices": ("output", "ffn_in", "ffn_out")}, "value, output and both"),
    (model(**LNS), "dslm", {"input_correlation": 0.3}, "LayerNorm Scaling multiplies"),
    (model(branch_scale=0.5), "dslm", {"input_correlation": 0.3}, "earlier scheme are replaced"),
    (model(norm_gain=2.0), "dslm", {"input_correlation": 0.3}, "gains of the norms"),
    (model(norm="none", branch_scale=0.0), "pre-ln", {}, "ReZero"),
    (model().with_scheme("t-fixup"), "post-ln", {}, "T-Fixup"),
    (model(), "mup", {"scale_logits": False}, "Definition 4.1"),
    (model(), "ds-init", {}, "its authors use norm='post'"),
    (model(norm="none"), "dyt", {}, "its authors use norm='pre' or norm='post'"),
    (model(norm="post"), "skipinit", {}, "its authors use norm='none' or norm='pre'"),
]


@pytest.mark.parametrize(("base", "name", "options", "words"), CLASHES)
def test_a_clash_is_a_warning_with_its_reference(
    base: moments.Transformer, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.warns(moments.ValidityWarning, match=words) as caught:
        base.with_scheme(name, **options)
    assert len(caught) == 1
    assert re.search(r"\(.*(20\d\d|arXiv).*\)$", str(caught[0].message))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: scheme.name)
def test_where_its_authors_use_it_a_scheme_is_silent(scheme: Scheme) -> None:
    base = model(norm=scheme.placements[0] if scheme.placements else "pre")
    options = {"input_correlation": 0.3} if scheme.name == "dslm" else {}
    changed = base.with_scheme(scheme.name, **options)
    assert scheme.placements == () or changed.norm in scheme.placements


def test_dslm_again_is_silent_and_changes_nothing() -> None:
    once = model().with_scheme("dslm", input_correlation=0.3)
    assert once.with_scheme("dslm", input_correlation=0.3) == once


def test_the_example_in_contributing_is_a_whole_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("## Add a scheme")[2].partition("\n## ")[0]
    (example,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    assert len(example.splitlines()) < 60
    module = types.ModuleType("moments.scheme.shrinking")
    module.__package__ = "moments.scheme"
    exec(compile(example, "CONTRIBUTING.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # The one line that the registry needs.
    monkeypatch.setattr(registry, "MODULES", (*registry.MODULES, "shrinking"))
    found = registry.schemes()[-1]
    assert found is module.SHRINKING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = model(layers=4).with_scheme(found.name)
    assert changed.branch_scale == pytest.approx((1.0, 0.5**0.5, 3**-0.5, 0.5))
    assert list(moments.compare_schemes(model(layers=4)).predictions)[-1] == found.name
    with pytest.raises(moments.DomainError, match="power"):
        model().with_scheme(found.name, power=-1.0)
