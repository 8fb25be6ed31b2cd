"""A model's share for one rank, cut by the plan that the model carries (`tp_plan` of transformers).

    colwise                 q, k, v, gate, up     rows of the weight: the rank's own heads, its part of the hidden width
    rowwise                 o, down               columns of the weight; the parts' products are summed over the ranks
    colwise_gather_output   the output layer      rows of the weight; the parts' logits are put side by side
    replicated…             norms                 every rank has all of it
    embedding…              the input layer       likewise, against the plan: a look-up of a few rows is not worth a sum

    rank 0    x ─► q0 k0 v0 ─► attention over its heads' KV ─► o0 ─┐
    rank 1    x ─► q1 k1 v1 ─► attention over its heads' KV ─► o1 ─┴─ sum ─► x, the same on every rank

With fewer KV heads than ranks each KV head lies on several ranks: the ranks whose query heads read it.

Rejected: transformers' own application of the plan. Its weights are DTensors, and each layer of each step pays for
their dispatch on the host, where a step has no time to lose; inside, slices and one sum a product are all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import ModelLoadError
from engine.model_checks import AttentionFacts


class Rank(Protocol):
    """One of the processes that compute a model together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, on every rank; may be in place."""
        ...

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts in their order, along the last axis, on every rank."""
        ...


class RowParallel(nn.Module):
    """A linear layer of which each rank has columns; the bias is added once, to the sum."""

    def __init__(self, linear: nn.Linear, bias: torch.Tensor | None, rank: Rank) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._rank = rank

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        total = self._rank.add_up(self.linear(hidden))
        return total if self.bias is None else total + self.bias


class GatheredColumns(nn.Module):
    """A linear layer of which each rank has rows, and whose whole output every rank needs."""

    def __init__(self, linear: nn.Linear, rank: Rank) -> None:
        super().__init__()
        self.linear = linear
        self._rank = rank

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._rank.side_by_side(self.linear(hidden))


def check_sharding(model: PreTrainedModel, facts: AttentionFacts, size: int) -> None:
    """Refuse what does not divide, or carries no plan that we can follow."""
    name = type(model).__name__
    if not _plan(model):
        raise ModelLoadError(f"{name} carries no tensor parallel plan: engine.tensor_parallel_size must be 1")
    if facts.num_heads % size:
        raise ModelLoadError(f"{name} has {facts.num_heads} attention heads; they cannot be divided among {size} ranks")
    if facts.num_kv_heads % size and size % facts.num_kv_heads:
        raise ModelLoadError(
            f"{name} has {facts.num_kv_heads} KV heads; they can neither be divided among {size} ranks nor the ranks "
            "among them"
        )
    for path, style, linear in _sharded(model):
        if style == "rowwise" and linear.in_features % size:
            raise ModelLoadError(f"{name}: {path} has {linear.in_features} inputs, which {size} does not divide")
        if style == "colwise" and linear.out_features % size and not _is_kv(path):
            raise ModelLoadError(f"{name}: {path} has {linear.out_features} outputs, which {size} does not divide")


def shard_model(model: PreTrainedModel, facts: AttentionFacts, rank: Rank) -> None:
    """Leave of every planned layer the share of `rank`, in place. `facts` are the whole model's."""
    check_sharding(model, facts, rank.size)
    tied = model.get_output_embeddings() is not None and bool(model.config.tie_word_embeddings)
    for path, style, linear in list(_sharded(model)):
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        if style == "colwise":
            setattr(parent, name, _rows(linear, _own_rows(path, linear, facts, rank)))
        elif style == "rowwise":
            setattr(parent, name, _row_parallel(linear, rank))
        elif linear.out_features % rank.size == 0 and not tied:  # else every rank has the whole output layer
            share = linear.out_features // rank.size
            own = slice(rank.rank * share, (rank.rank + 1) * share)
            setattr(parent, name, GatheredColumns(_rows(linear, own), rank))


def _plan(model: PreTrainedModel) -> dict[str, str]:
    plan: dict[str, str] | None = model.tp_plan
    return plan or {}


def _sharded(model: PreTrainedModel) -> Iterator[tuple[str, str, nn.Linear]]:
    """(path, style, layer) of every module that the plan cuts."""
    plan = _plan(model)
    for path, module in model.named_modules():
        style = next((plan[pattern] for pattern in plan if fnmatchcase(path, pattern)), None)
        if style is None or style.startswith(("replicated", "embedding")):
            continue
        if style not in ("colwise", "rowwise", "colwise_gather_output") or not isinstance(module, nn.Linear):
            raise ModelLoadError(
                f"{type(model).__name__}: its plan cuts {path} {style}, which is not one of the cuts that are known "
                "here: engine.tensor_parallel_size must be 1"
            )
        if style == "colwise_gather_output" and module is not model.get_output_embeddings():
            raise ModelLoadError(
                f"{type(model).__name__}: its plan gathers {path}, so that every rank would hold all KV: "
                "engine.tensor_parallel_size must be 1"
            )
        yield path, style, module


def _is_kv(path: str) -> bool:
    return path.rpartition(".")[2] in ("k_proj", "v_proj")


def _own_rows(path: str, linear: nn.Linear, facts: AttentionFacts, rank: Rank) -> slice:
    if _is_kv(path) and rank.size > facts.num_kv_heads:
        head = rank.rank * facts.num_kv_heads // rank.size
        return slice(head * facts.head_dim, (head + 1) * facts.head_dim)
    share = linear.out_features // rank.size
    return slice(rank.rank * share, (rank.rank + 1) * share)


def _rows(linear: nn.Linear, own: slice) -> nn.Linear:
    bias = None if linear.bias is None else linear.bias[own]
    return _linear(linear.weight[own], bias)


def _row_parallel(linear: nn.Linear, rank: Rank) -> RowParallel:
    share = linear.in_features // rank.size
    own = slice(rank.rank * share, (rank.rank + 1) * share)
    bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return RowParallel(_linear(linear.weight[:, own], None), bias, rank)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A layer of its own memory: the whole weight is let go."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer
