"""`moments.check` of a live module: one reading and one measurement, held against a prediction."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import DomainError, MomentsError, listed, without_warnings
from ..model.embedding import Embedding
from ..model.patches import PatchEmbedding, SoundEmbedding
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..prediction.measurement import Measurement, last_grad_kernel
from ..prediction.predict import predict
from ..show.comparison import Comparison, compare
from ..show.differences import Case
from ..show.findings import Finding, Report, Row
from ..show.health import Evidence, first_outlier, rules, stream_numbers
from ..show.outliers import odd_layers
from ..show.recognition import Weight, WeightRule, recognise
from .alike import BIDIRECTIONAL, never_used, normalised_over_queries, not_masked, shared_matrix
from .anatomy import anatomy_of, forget
from .architecture import promised_by
from .batches import (
    configured,
    first_stream,
    inputs_for,
    is_ids,
    measured_gradient,
    measured_moments,
)
from .checkpoints import opened
from .dataflow import ModuleReading
from .dataflow.reading import random_part
from .describe import broken, described_as
from .diagnose import Text, at_length, case_of, diagnose, tokens_entering
from .entries import EntryMoments
from .expectation import model_of
from .factory import seen_of, unwritten
from .measure import Loss, measure
from .open_check import FAR, NotRead, check_open, check_promised, not_read, random_outcome
from .roles import block_of, gathered, gathered_names, gathered_pattern, split_at_layer, tensors_of
from .running import aliases, as_named, batch_on_cpu, grouped
from .tensors import WRITTEN, Checked, Tensors, odd_tensors
from .weight_findings import PRE_OR_POST, STRUCTURE, WeightFindings, in_words

FEW_ROWS = 64
"""Tokens up to which tokens of unlike variance are predicted one by one."""

UNEVEN = 10.0
"""Ratio of the largest to the least token variance at layer 1 up to which tokens count as alike."""

SCALED = 0.02
"""Distance below 1 from which a residual multiplier counts as intended."""

OTHER_INPUTS = re.compile(
    r"(?!past_)(.*(pixel|image|video|audio|speech|wave|feature|spectrogram|bbox|entity).*"
    r"|.*protein.*|input_values"
    r"|encoder_hidden_states|encoder_outputs)"
)
"""Names of arguments of forward that are optional inputs of another kind."""

TABLE = 0.1
"""Difference from 1 up to which a table's variance counts as nn.Embedding's own, and the std of
matrices below which that is a remark."""

PLACEMENTS = {"pre": "Pre-LN", "post": "Post-LN", "sandwich": "sandwich", "none": "without norms"}


def check_module(
    module: nn.Module | str | os.PathLike[str],
    batch: Any = None,
    *,
    scheme: Any = None,
    loss: Loss | None = None,
) -> Report:
    """`moments.check` of a module or of the path of a checkpoint.

    Raises:
        DomainError: an argument out of range.
        MomentsError: a module that cannot be read, or that cannot be run.
    """
    module = opened(module)
    if broken := tuple(unwritten(module)):
        everything = ("everything else: it cannot be run",)
        return Report(type(module).__name__, "", broken, (), everything, ())
    batch = batch_on_cpu(as_named(module, batch))
    try:
        return Checking(module, batch, scheme, loss).report()
    except NotRead as refusal:
        if scheme is not None:  # a scheme needs the module's roles
            raise
        if (promised := promised_by(module)) is not None:
            with contextlib.suppress(MomentsError):
                return check_promised(module, batch, promised, loss, refusal)
        return check_open(module, batch, refusal)


class Checking:
    """The check of one module.

    Attributes:
        promised: what the module's config or class says of its initialisation; None if nothing.
        architecture: the module as it was read, else as promised, at the measured length.
        described: the same with the module's own variances and mask.
        random: the submodule that draws random numbers in evaluation mode; None if none.
        idle: paths of the largest submodules that are never run.
        bidirectional: whether tokens attend to later ones; None if unknown.
    """

    def __init__(self, module: nn.Module, batch: Any, scheme: Any, loss: Loss | None) -> None:
        self.module, self.scheme, self.loss = module, scheme, loss
        self.has_targets = batch is not None and not isinstance(batch, Tensor)
        forget(module)  # its entries may have changed
        self.reading = self._read(batch)
        self.roles = self.reading.roles
        self.promised = promised_by(module)
        self.promised_by = "config" if configured(module) else "class"
        model = self._declared(batch)
        example = self.reading.example
        self.inputs = inputs_for(module, self.roles, self.promised or model, batch, loss, example)
        self.measurement = self._measured(batch is None)
        if (wrong := over_first_axis(self.inputs.batch, self.measurement)) is not None:
            name = type(module).__name__
            raise NotRead(f"{name} is not read as layers over the tokens of a sequence", (wrong,))
        self.architecture = at_length(model, self.measurement)
        if self.promised is not None:
            self.promised = at_length(self.promised, self.measurement)
        self.tensors = Tensors.of(module, self.reading)
        self.random = random_part(module, self.inputs.few)
        self.idle = tuple(dict.fromkeys(self._idle_parts()))
        self.notes: list[str] = []
        self.described = self._described()
        pictures = isinstance(self.architecture.embedding, PatchEmbedding)
        known = self.random is None and not pictures
        self.bidirectional = self.reading.bidirectional if known else None
        if self.bidirectional == self.described.causal and not self.reading.unmasked:
            self.described = self.described.replace(causal=not self.bidirectional)
        names = dict.fromkeys(role.full_name for role in self.roles.roles)
        self.names = {name: self.tensors.names(name) for name in names}
        self.comparison = self._compared()

    def _read(self, batch: Any) -> ModuleReading:
        try:
            reading = anatomy_of(self.module, batch)
        except DomainError:
            raise
        except MomentsError as error:
            raise not_read(self.module, batch, str(error)) from None
        if reading.unlayered:
            why = "; ".join(dict.fromkeys((*reading.unlayered, *reading.reasons)))
            raise not_read(self.module, batch, f"{type(self.module).__name__}: {why}")
        return reading

    def _declared(self, batch: Any) -> Transformer:
        """The module as it was read, else as promised; a `NotRead` if neither is known."""
        name, own, promised = type(self.module).__name__, self.reading.model, self.promised
        if promised is not None and promised.mixer is not None and self.scheme is None:
            said = f"{name}: its config has blocks in attention's place"
            raise not_read(self.module, batch, said)
        by_class = self.promised_by == "class" and own is not None and own.encoder is None
        if own is not None and promised is not None and by_class and promised.encoder is None:
            # A class of torch's says how it draws itself; masks, tables and head are the module's.
            self.promised = own.replace(weights=promised.weights, biases=promised.biases)
        model = own or self.promised
        if model is None:
            count = len(self.roles.unidentified)
            reasons = [*dict.fromkeys(self.reading.reasons)]
            reasons += [f"{count} parameters of unknown role"] * bool(count)
            said = f"{name} is not read as layers of attention and feed-forward"
            raise not_read(self.module, batch, f"{said}: {'; '.join(reasons)}")
        return model

    def _measured(self, random: bool) -> Measurement:
        try:
            return measure(self.module, self.inputs.batch, loss=self.inputs.loss)
        except MomentsError:
            raise
        except Exception as error:  # the module's own code may reject random input
            if not random:
                raise
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise MomentsError(
                f"{type(self.module).__name__} was read, but does not run on random input "
                f"({said}): pass batch="
            ) from error

    def _described(self) -> Transformer:
        """The module with its own variances; with the promised sums if they could not be read."""
        self.notes += broken(self.tensors)
        model = self.architecture
        if self.reading.model is None:
            why = "; ".join(self.reading.reasons)
            self.notes.append(f"its sums are taken as declared: {why}")
            with contextlib.suppress(DomainError):  # entries that no declaration allows
                model = described_as(model, self.tensors)
        encoder = model.encoder
        sound = getattr(getattr(self.promised, "encoder", None), "embedding", None)
        if encoder is not None and encoder.embedding is None and isinstance(sound, SoundEmbedding):
            # A pass does not show that convolutions embed sound; its config does.
            encoder = encoder.replace(embedding=sound, seq_len=sound.seq_len)
            return model.replace(encoder=encoder)
        return model

    def _idle_parts(self) -> Iterator[str]:
        """The largest submodules of which no part with parameters was run: their parameters are not
        read and get no gradient."""
        with_gradient = {
            str(row["parameter"])
            for row in self.measurement.weight_gradient_rows
            if float(row["squared_norm"]) > 0
        }
        names = aliases(self.module)
        unread = {self.module.get_parameter(name) for name in self.reading.unused}
        idle, run = list[str](), list[str]()
        for path, part in self.module.named_modules():
            if own := set(part.parameters(recurse=False)):
                unused = own <= unread and not any(with_gradient & set(names[p]) for p in own)
                (idle if unused else run).append(path)
        for path in idle:
            parts = path.split(".")
            above = (".".join(parts[: end + 1]) for end in range(len(parts)))
            free = (p for p in above if not any(f"{q}.".startswith(f"{p}.") for q in run))
            yield from itertools.islice(free, 1)

    def _compared(self) -> Comparison:
        self.text = Text.of(self.module, self.described, self.inputs.batch, self.inputs.loss)
        case = case_of(self.described, self.text, self.measurement)
        self.case = self._by_token(case)
        with without_warnings():
            try:
                prediction = predict(self.case.model, **self.case.inputs)
            except DomainError as error:
                if "pixels" not in self.case.inputs:
                    raise
                # A picture's class token may be zero, which has no correlation with any patch.
                self.notes.append(f"what enters layer 1 was measured, not predicted: {error}")
                inputs = measured_moments(self.measurement)
                inputs |= measured_gradient(self.described, self.measurement, inputs)
                prediction = predict(self.described.replace(head=None), **inputs)
            return compare(prediction, self.measurement, same_weights=True)

    def _by_token(self, case: Case) -> Case:
        """The case with the measured kernel at layer 1, if few tokens of unlike variance enter."""
        variances = self.measurement.token_variance[0]
        alike = float(np.max(variances)) <= UNEVEN * float(np.min(variances))
        if alike or "variance" not in case.inputs or self.measurement.seq_len > FEW_ROWS:
            return case
        first = first_stream(self.module, self.inputs.batch)
        result = tokens_entering(first, case, self.measurement)
        if not result:
            return case
        case = result[0].apply(case)
        inputs = {name: v for name, v in case.inputs.items() if not name.startswith("grad_")}
        if len(inputs) < len(case.inputs):
            inputs["grad_kernel"] = last_grad_kernel(self.measurement)
        return dataclasses.replace(case, inputs=inputs)

    # --- findings ---------------------------------------------------------------------------------

    def report(self) -> Report:
        rule, target, remarks = self._target()
        planned, promised = self.scheme is not None, self.promised
        words = "the rest of its init"
        words += f" ({rule.title})" if rule.intended is None else ""
        if planned:
            words = in_words(self.scheme)
        elif promised is not None:
            words = f"what its {self.promised_by} promises"
        audited = Checked.of(self.tensors, target)
        weights = WeightFindings(self.tensors, target, audited, words, planned, promised, rule)
        strict = weights.strict
        findings = [*seen_of(self.module), *weights.findings(self._failed(audited, rule, strict))]
        findings += self._odd_layers(findings, strict)
        notes = [*remarks, *weights.notes, *self._remarks(rule)]
        dtype = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        intended = target if strict else None
        seen = Evidence(self.comparison.prediction, self.comparison, self.names, intended, dtype)
        more, more_notes = rules(seen)
        findings += [*self._structure(), *self._attention(weights, audited.rows), *more]
        # The prediction takes layers as independent, which copies are not.
        if not any(one.kind == "copied layers" and one.severity != "note" for one in findings):
            findings += self._mismatch(bool(findings))
        # Copies are a finding already.
        notes += [*more_notes, *(n for n in self.notes if "hold the same entries" not in n)]
        return Report(
            source=type(self.module).__name__,
            scheme=self._verdict(rule, weights.wrong),
            findings=tuple(findings),
            notes=tuple(notes),
            unchecked=self._unchecked(audited.unchecked),
            rows=(*stream_numbers(self.comparison.prediction, self.comparison), *weights.rows()),
            model=self.described,
            prediction=self.comparison.prediction,
            comparison=self.comparison,
            read=self.inputs.words,
            _why=lambda: self._causes(target),
        )

    def _failed(self, audited: Checked, rule: WeightRule, strict: bool) -> list[Row]:
        """The failed rows of an audit, without those that have findings of their own."""
        skipped = {"temperature"} if self.random is None else {"temperature", *STRUCTURE}
        unnormed = {f"{name} sum in {layer}" for layer, name in self.reading.unnormed}
        misplaced = {layer for layer, _ in self.reading.misplaced_norms}
        if not (strict or rule.published):  # the reading saw the norm's factor as it is
            skipped |= {"norm_output_scale"}
        return [
            row
            for row in audited.rows
            if row.passed is False
            and row.quantity not in skipped
            and (row.quantity != "architecture" or self._is_declared(row))
            and f"{row.role} in {row.layer}" not in unnormed
            and not (row.layer in misplaced and row.quantity in (*STRUCTURE, "norm_output_scale"))
        ]

    def _causes(self, target: Transformer) -> tuple[Finding, ...]:
        """The causes by `diagnose`, which measures once more."""
        with without_warnings():
            return diagnose(self.module, self.inputs.batch, target, loss=self.inputs.loss).causes()

    def _verdict(self, rule: WeightRule, wrong: Sequence[str]) -> str:
        """The initialisation that was recognised, in words."""
        names = self.tensors.names
        if rule.intended is None and rule.share < 0.5:
            title = "its weights are of no published scheme and no framework's default"
            return f"{title} (nearest: {rule.title})"
        words = rule.title
        if rule.unexplained and rule.intended is None:
            left = rule.roles_left()
            words += f", but for {', '.join(left)} ({', '.join(names(*left))})"
        if rule.intended is not None:
            moved = list(wrong) or list(rule.roles_left())
            words += f" ({', '.join(names(*moved))})" if moved else ""
        promised = self.promised if self.scheme is None else None
        if promised is not None and rule.model != promised and wrong:
            words += f"; its {self.promised_by} promises otherwise"
        return words

    def _is_declared(self, row: Row) -> bool:
        """Whether a plan or config declares the field of a row, which no other finding names."""
        field, planned = row.role.rpartition(".")[2], self.scheme is not None
        declared = planned or (self.promised is not None and self.promised_by == "config")
        named = field in ("causal", "tied") and (not planned or bool(self.reading.unmasked))
        return declared and field != "seq_len" and not named

    def _target(self) -> tuple[WeightRule, Transformer, list[str]]:
        """The rule of the weights, the model that they are compared with, and remarks."""
        weights = []
        for role, entries in self.tensors.entries:
            inside = role.name in MATRICES and not role.stack and role.layer > 0
            if inside and role.full_name not in self.tensors.zero:
                spread = entries.spread if math.isfinite(entries.spread) else 1.0
                numbers = entries.square, spread, entries.count, role.fan_in, role.fan_out
                weights.append(Weight(role.layer, role.name, *numbers))
        rule = recognise(weights, self.architecture, self.promised, self.promised_by)
        recognised = rule.intended or rule.model
        if self.promised_by == "class" and rule.share >= 0.5 and recognised is not self.promised:
            self.promised = None  # drawn anew by its user, which a config would say
        if self.scheme is not None:
            own = self.architecture
            target = at_length(model_of(self.scheme, own), self.measurement)
            outside = {
                name: getattr(target, name) or getattr(own, name) for name in ("embedding", "head")
            }
            return rule, target.replace(**outside), []
        if self.promised is not None:
            if rule.unexplained or not rule.published or rule.model == self.promised:
                return rule, self.promised, []
            remark = f"its weights are not those that its {self.promised_by} promises"
            return rule, rule.model, [remark]
        return rule, self.described if rule.share < 0.5 else recognised, []

    def _structure(self) -> Iterator[Finding]:
        """Faults of the module's code, which its weights do not show."""
        idle = () if self._other_inputs() else self.idle
        for pattern, paths in grouped(idle, gathered_pattern).items():
            parts = [(path, self.module.get_submodule(path)) for path in paths]
            named = [
                f"{path}.{name}" for path, part in parts for name, _ in part.named_parameters()
            ]
            yield never_used(pattern if len(paths) > 1 else paths[0], named)
        for pattern, paths in grouped(self.reading.detached, gathered_pattern).items():
            which = pattern if len(paths) > 1 else paths[0] or "the module itself"
            why = f"{which} detaches what it computes with: no gradient flows back through that"
            mend = "leave .detach() out, or keep it where the gradient is meant to end"
            yield Finding("warning", "gradient cut", tuple(paths), (), reason=why, mend=mend)
        yield from random_outcome(self.random)
        yield from self._mask()
        yield from self._norms()
        yield from self._zero_heads()
        shared = self.reading.shared
        if shared and self.reading.model is not None and self._shares_one_matrix():
            layers = tuple(sorted({layer for row in shared.values() for layer in row}))
            yield shared_matrix(", ".join(shared), gathered_names(list(shared)), layers)
        yield from self._tying()

    def _tying(self) -> Iterator[Finding]:
        """A head that is tied, untied or a copy of the token table against what is promised."""
        head = self.described.head
        promised = None if self.promised is None else self.promised.head
        known = self.scheme is None and self.described.embedding is not None
        if known and head is not None and promised is not None and head.tied != promised.tied:
            names = self.tensors.names("head") or self.tensors.names("token")
            kind, what = "untied head", "a matrix of its own"
            mend = "head.weight = tokens.weight ties them"
            if head.tied:
                kind, what = "tied head", "the token table itself"
                mend = "give the head a matrix: "
                mend += "head.weight = nn.Parameter(tokens.weight.detach().clone())"
            why = f"the head is {what}, which its {self.promised_by} promises not to be"
            yield Finding("error", kind, names, reason=why, mend=mend)
        elif head is not None and not head.tied:
            parameters = dict(self.module.named_parameters())
            names = self.tensors.names("token")[:1] + self.tensors.names("head")[:1]
            both = [parameters[name].detach() for name in names if name in parameters]
            if len(both) == 2 and torch.equal(*both):
                why = "the head starts as a copy of the token table, in a matrix of its own: the "
                why += "two part with the first step (head.weight = tokens.weight ties them)"
                yield Finding("note", "copied head", names, reason=why)

    def _zero_heads(self) -> Iterator[Finding]:
        """Heads whose rows of a matrix are zero although other heads' are not."""
        tensors = tensors_of(self.module)
        d_head = self.described.d_head or 0
        for role in self.roles.roles:
            if role.name not in ("query", "key", "value", "output") or role.stack:
                continue
            matrix = block_of(tensors, role).detach()
            if matrix.ndim != 2 or not d_head or role.full_name in self.tensors.zero:
                continue
            is_output = role.name == "output"
            width = role.fan_in if is_output else role.fan_out
            rows = matrix.T if is_output != role.transposed else matrix
            if len(rows) != width or width % d_head or width == d_head:
                continue
            nonzero = rows.reshape(width // d_head, -1).any(1)
            if bool(nonzero.any()) and not bool(nonzero.all()):
                heads = [n + 1 for n, some in enumerate(nonzero.tolist()) if not some]
                where = f"head{'s' * (len(heads) > 1)} {listed(heads)} of layer {role.layer}"
                why = f"{role.name} of {where} is zero, where that of the other heads is not"
                at, mend = (gathered([role]), (role.layer,)), "draw every head alike"
                yield Finding("warning", "zero head", *at, 0.0, math.nan, why, mend)

    def _mask(self) -> Iterator[Finding]:
        """Tokens that attend to the tokens which they are to predict."""
        layers = self.reading.unmasked
        promised = self.promised is not None and self.promised.causal
        severity, why = "error", "a token's output changes with a later token, and "
        if layers:
            one = len(layers) == 1
            why = f"layer{'s' * (not one)} {listed(layers)} do{'es' * one} not mask later tokens, "
            why += "where the other layers do: what follows is of the whole sequence"
        elif not self.bidirectional:
            return
        elif self._predicts_next_token():
            why += "the loss is the next token's"
        elif promised:
            why += f"its {self.promised_by} promises a causal mask"
        elif self._may_predict_next_token():
            severity = "warning"
            why = (
                "attention is full, and the head gives logits over the vocabulary of its tokens: a "
                "model of the next token sees what it is to predict (where masked tokens are "
                "predicted, pass loss= or scheme= with causal=False)"
            )
        else:
            return
        names = self.tensors.names("query", "key", layers=layers)[:2]
        yield not_masked(severity, names, layers, why)

    def _may_predict_next_token(self) -> bool:
        """Whether logits are over the input's vocabulary, and nothing says for what task."""
        head, embedding = self.described.head, self.described.embedding
        declared = self.scheme is not None and not isinstance(self.scheme, str)
        if declared or self.loss is not None or self.promised is not None or self.has_targets:
            return False
        if head is None or head.transform is not None or not isinstance(embedding, Embedding):
            return False
        if head.loss != "masked" or embedding.segment_variance > 0:
            return False
        kinds = {type(part) for part in self.module.modules()}
        own = (kind.__name__ for kind in kinds if not kind.__module__.startswith("torch."))
        return not any(map(BIDIRECTIONAL.search, own))

    def _odd_layers(self, findings: Sequence[Finding], strict: bool) -> Iterator[Finding]:
        """Layers whose entries or residual multipliers differ from those of all others."""
        layers = self.described.layers
        known = {
            (layer, name)
            for t in findings
            if t.severity != "note" and t.kind in ("wrong variance", "norm gain", "biases")
            for layer in t.layers
            for name in t.where
        }
        rows: dict[str, dict[int, list[tuple[str, EntryMoments]]]] = {}
        for role, entries in self.tensors.entries:
            if 1 <= role.layer <= layers and not role.stack:
                by_layer = rows.setdefault(role.full_name, {})
                by_layer.setdefault(role.layer, []).append((role.label, entries))
        count = len(rows) + 4
        complete = {name: by_layer for name, by_layer in rows.items() if len(by_layer) == layers}
        for name, finding in odd_tensors(complete, count, () if strict else MATRICES):
            places = [(finding.layers[0], n) for n in (*finding.where, *self.tensors.names(name))]
            if not known.intersection(places):
                yield finding
        for field, words in (("branch_scale", "beta"), ("skip_scale", "lambda")):
            if self.reading.model is None or strict:
                continue
            values = self.reading.model.by_block(field) ** 2
            for column, block in enumerate(("attention", "ffn")):
                for place in odd_layers(values[:, column], [WRITTEN] * layers, count):
                    others = float(np.median(np.delete(values[:, column], place)) ** 0.5)
                    value, layer = float(values[place, column] ** 0.5), (place + 1,)
                    names = self.tensors.names(("output", "ffn_out")[column], layers=layer)
                    why = f"{words} of the {block} sum in layer {place + 1} is {value:.4g}, where "
                    why += f"the other layers have {others:.4g}"
                    kind, mend = field.replace("_", " "), "multiply every layer's branch alike"
                    yield Finding("warning", kind, names, layer, value, others, why, mend)

    def _remarks(self, rule: WeightRule) -> Iterator[str]:
        """What is unusual and may be intended."""
        read = self.reading
        layers = self.described.layers
        frozen = [
            role.parameter
            for role in self.roles.roles
            if 1 <= role.layer <= layers
            and not self.module.get_parameter(role.parameter).requires_grad
        ]
        if frozen:
            names = ", ".join(gathered_names(list(dict.fromkeys(frozen))))
            yield f"frozen, without a gradient (requires_grad=False): {names}"
        yield from read.remarks
        if read.model is not None and read.model.layernorm_scaling in (
            "attention-only",
            "ffn-only",
        ):
            block = str(read.model.layernorm_scaling).removesuffix("-only")
            yield f"LayerNorm Scaling, 1/sqrt(l), acts on the norms of {block} blocks alone"
        branch = self.described.by_block("branch_scale")
        if rule.by_depth and rule.share >= 0.5 and 0 < float(np.median(branch)) < 1 - SCALED:
            yield (
                f"a residual multiplier ({float(np.median(branch)):.3g}) stands on top of matrices "
                f"that are scaled with depth already ({rule.title}): depth is counted twice"
            )
        if read.shared and read.model is not None and not self._shares_one_matrix():
            names = ", ".join(gathered_names(list(read.shared)))
            yield f"shared by several layers, whose gradients add up: {names}"
        model = self.described
        if set(model.placements) == {"post"} and model.head is not None and model.head.norm:
            yield (
                "every layer is Post-LN and ends in a norm, and a final norm follows: one of the "
                "two is needed, as Pre-LN needs the final one"
            )
        token = getattr(model.embedding, "token_variance", None)
        own = self.promised is None and self.scheme is None
        if own and token is not None and abs(token - 1) < TABLE and model.weights is not None:
            inner = float(np.median(np.asarray(model.weights.query)))
            if inner < TABLE**2:
                name = self.tensors.names("token")[0]
                yield (
                    f"{name} has a std of {math.sqrt(token):.3g}, nn.Embedding's own, "
                    f"{math.sqrt(token / inner):.3g} times that of the matrices"
                )

    def _shares_one_matrix(self) -> bool:
        """Whether a single matrix of each shared role is shared, as no published model has it."""
        roles = [r for r in self.roles.roles if not r.stack and r.parameter in self.reading.shared]
        pairs = grouped(dict.fromkeys((r.name, r.parameter) for r in roles), lambda pair: pair[0])
        return bool(pairs) and all(len(group) == 1 for group in pairs.values())

    def _predicts_next_token(self) -> bool:
        """Whether the module's own loss is that of the next token."""
        head, text = self.described.head, self.text
        if head is not None and head.loss == "causal":
            return True
        if self.inputs.loss is not self.loss or text.ids is None or text.targets is None:
            return False
        return np.array_equal(text.targets[:, :-1], text.ids[:, 1:])

    def _norms(self) -> Iterator[Finding]:
        """Blocks without the norms that all others have, and norms at other places."""
        named = self.roles.named
        outer = [r.parameter for r in named("embedding.norm.gain", "embedding.norm.bias")]
        first = {split_at_layer(role.parameter)[:2] for role in named("query") if role.layer == 1}
        if outer and {split_at_layer(name)[:2] for name in outer} == first:
            why = "a norm of layer 1 normalises the stream itself, besides what its block reads"
            yield _misplaced(gathered_names(outer), 1, why)
        unnormed = self.reading.unnormed
        tensors = tensors_of(self.module)
        gains = [
            name
            for name in self.roles.unidentified
            if tensors[name].ndim == 1
            and not bool(tensors[name].any())
            and name.endswith(("weight", "gain", "scale", "g", "gamma"))
        ]
        if unnormed and len(gains) == len(unnormed):  # one pass does not see a norm of gain 0
            layers = tuple(layer for layer, _ in unnormed)
            why = "every gain is 0: the block behind the norm reads nothing"
            mend = "start gains at 1: nn.init.ones_(norm.weight)"
            names = gathered_names(gains)
            yield Finding("warning", "norm gain", names, layers, 0.0, 1.0, why, mend)
            return
        for layer, kind in self.reading.misplaced_norms:
            usual = PLACEMENTS.get(self.described.placements[layer - 1], "another form")
            names = self.tensors.names("attention.norm.gain", "ffn.norm.gain", layers=(layer,))
            why = f"layer {layer} is {PLACEMENTS.get(kind, kind)}, where the others are {usual}"
            yield _misplaced(names, layer, why)
        for layer, name in unnormed:
            matrices = ("query", "key", "value") if name == "attention" else ("ffn_in", "gate")
            why = f"the {name} block of layer {layer} has no norm, where the other blocks have one"
            yield _misplaced(self.tensors.names(*matrices, layers=(layer,)), layer, why)

    def _other_inputs(self) -> tuple[str, ...]:
        """Arguments of forward that were not passed and that idle submodules may need."""
        large = any(
            sum(p.ndim > 1 for p in self.module.get_submodule(path).parameters()) > 1
            for path in self.idle
        )
        passed = self.inputs.batch if isinstance(self.inputs.batch, Mapping) else {}
        names = inspect.signature(self.module.forward).parameters if large else ()
        return tuple(n for n in names if n not in passed and OTHER_INPUTS.fullmatch(n))

    def _attention(self, weights: WeightFindings, audited: Sequence[Row]) -> Iterator[Finding]:
        if layers := self.reading.over_queries:
            names = self.tensors.names("query", "key", layers=layers)
            yield normalised_over_queries(names, layers)
        yield from weights.attention(self._factors(audited), self.promised is not None)

    def _factors(self, audited: Sequence[Row]) -> Iterator[tuple[str, int, float]]:
        """Stack, layer and excess factor of q k, where it is not what it should be."""
        model, weights = self.reading.model, self.described.weights
        if self.promised is not None or self.scheme is not None:
            for row in audited:
                if row.quantity == "temperature" and row.passed is False:
                    yield row.role.removesuffix("attention"), row.layer, row.expected / row.measured
            return
        if weights is None or model is None or model.qk_norm is not None:
            return
        ratio = float(np.mean(np.asarray(weights.query) / np.asarray(weights.key)))
        for layer, temperature in enumerate(model.temperatures, start=1):
            # Small queries may replace the factor, as in T5.
            if temperature > 1 or (temperature < 1 and ratio >= 0.5):
                yield "", layer, 1 / float(temperature)

    def _mismatch(self, explained: bool) -> Iterator[Finding]:
        """The first point of the stream that is far from the prediction by the module's weights."""
        points = self.comparison.outliers(FAR)
        points = points[points["stack"] == ""]
        if not len(points):
            return
        forward = bool((points["quantity"] == "variance").any())
        if self.uneven and not forward:
            return
        source = "module's own weights, sums and norms give"
        layer, measured, predicted, reason = first_outlier(points, source)
        path = self._path(layer, forward)
        where = (path,) if path else (), (layer,) if layer else ()
        reason += "" if explained else "; nothing that was read of it explains that"
        severity, kind = "note" if explained else "warning", "not what its weights give"
        mend = "look at the code of that layer: a scale, dropout, mask or norm that hooks do not "
        mend += "see"
        yield Finding(severity, kind, *where, measured, predicted, reason, mend)

    @functools.cached_property
    def uneven(self) -> str:
        """Why gradients are not compared with their prediction; "" if they are.

        A norm multiplies a token's squared gradient by 1/variance. If one of L tokens has 1/R of
        the others' variance, the mean of that factor over tokens is R/L.
        """
        variances = self.measurement.token_variance[0]
        least, most = float(np.min(variances)), float(np.max(variances))
        by_token = self.comparison.prediction.token_variance is not None
        if by_token or most <= UNEVEN * least:
            return ""
        return (
            f"gradients against its weights (tokens enter with variances of {least:.3g} to "
            f"{most:.3g}, and are predicted as alike)"
        )

    def _path(self, layer: int, forward: bool) -> str:
        """The submodule whose output is the first that departs in a layer."""
        frame = self.comparison.to_frame()
        name = "variance" if forward else "grad_variance"
        rows = frame[(frame["quantity"] == name) & (frame["layer"] == max(layer, 1))]
        sites = {(p.layer, p.site): p.path for p in self.reading.sites or ()}
        for row in rows.to_dict("records"):
            if abs(float(row["error"])) > 0.25:
                return sites.get((int(row["layer"]), str(row["site"])), "")
        return sites.get((layer, "stream"), "")

    def _unchecked(self, audited: Sequence[str]) -> tuple[str, ...]:
        strict = self.scheme is not None or self.promised is not None
        phrases = [p for p in audited if strict or "(of which nothing is planned)" not in p]
        phrases = [p.replace("some temperatures", "the scale of attention logits") for p in phrases]
        if not strict:  # one pass shows it
            phrases = [p for p in phrases if not p.startswith("the scale of attention logits")]
        if self.described.embedding is None:
            phrases.append("the embedding (what enters layer 1 was measured, not predicted)")
        if self.uneven:
            phrases.append(self.uneven)
        if self.comparison.prediction.loss is None and self.measurement.loss is not None:
            phrases.append("head and loss (the last layer's gradient was measured, not predicted)")
        if self.measurement.loss is None:
            phrases.append("a loss (none in the module, and none was passed)")
        if (waiting := self._other_inputs()) and self.idle:
            parts = ", ".join(dict.fromkeys(map(gathered_pattern, self.idle)))
            phrases.append(f"{parts} (not run without {' or '.join(waiting)}: pass batch=)")
        if self.bidirectional is None:
            phrases.append("the attention mask")
        return tuple(dict.fromkeys(phrases))


def over_first_axis(batch: Any, measurement: Measurement) -> Finding | None:
    """A finding if attention mixes the first axis of token ids, that of sequences."""
    parts = batch.values() if isinstance(batch, Mapping) else [batch]
    ids = next((t for t in parts if is_ids(t) and t.ndim == 2), None)
    if ids is None or measurement.seq_len != len(ids) or len(ids) >= ids.shape[1]:
        return None
    why = f"attention runs over the first axis of what is read, {len(ids)} long, and not over the "
    why += f"second, of {ids.shape[1]} tokens: sequences of a batch see each other, and no token "
    why += "sees another of its sequence"
    mend = "batch_first=True, or x.transpose(0, 1) before the layers and behind them"
    return Finding("error", "attention over the batch", (), (), reason=why, mend=mend)


def _misplaced(names: tuple[str, ...], layer: int, why: str) -> Finding:
    return Finding("warning", "norm placement", names, (layer,), 0.0, 1.0, why, PRE_OR_POST)
