"""The forward and backward passes of one optimizer step.

With every implementation the gradients are those of the mean loss over this rank's share of the batch. Local batches
are processed one after the other, so memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.parallelisms.pipeline_llama import INTERLEAVED
from torchtitan_lite.parallelisms.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

Timer = Callable[[str], AbstractContextManager[None]]


def build_forward_backward(
    config: JobConfig,
    plan: Plan,
    sizes: ModelArgs,
    parts: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    rank: int,
    accumulation: int,
    scaler: torch.amp.GradScaler,
    timer: Timer,
    device: torch.device,
) -> ForwardBackward:
    """Return the implementation for `plan`. `rank` has the model parts `parts`; a step has `accumulation` batches."""
    if plan.dims.pp == 1:
        return Accumulating(parts[0], scaler, timer)
    stages = plan.stages_of(rank)
    # Imported only here: it takes a quarter of a second, and most runs have no pipeline.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    with torch.device("meta"):  # Inputs and outputs of stages: the buffers between them get their shapes.
        dtype, seq_len = getattr(torch, config.training.mixed_precision_param), config.training.seq_len
        tokens = torch.empty(config.training.batch_size // plan.num_microbatches, seq_len, dtype=torch.int64)
        local = (len(tokens), seq_len // plan.dims.tp, sizes.dim)  # Tensor parallelism splits the sequence.
        hidden = torch.empty(local, dtype=dtype, requires_grad=True)
        logits = torch.empty(*tokens.shape, sizes.vocab_size, dtype=dtype, requires_grad=True)
    built: list[Any] = []  # torch asks for a list of a private class.
    for part, stage in zip(parts, stages, strict=True):
        ends = tokens if stage.is_first else hidden, logits if stage.is_last else hidden
        built.append(PipelineStage(part, stage.index, stage.num_stages, device, *ends, group=mesh["pp"].get_group()))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        # Backward differentiates the sum of all losses of a step, not their mean.
        return next_token_loss(logits, targets) / (plan.num_microbatches * accumulation)

    options: dict[str, Any] = {"n_microbatches": plan.num_microbatches, "loss_fn": loss, "scale_grads": False}
    schedule: PipelineScheduleSingle | PipelineScheduleMulti
    if config.parallelism.pipeline_parallel_schedule == INTERLEAVED:
        schedule = ScheduleInterleaved1F1B(built, **options)
    else:
        kind = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[config.parallelism.pipeline_parallel_schedule]
        schedule = kind(built[0], **options)
    return Pipelined(schedule, timer, has_first=stages[0].is_first, has_last=stages[-1].is_last)


class Accumulating:
    """Run a whole model, one local batch after the other.

    The call adds the gradients of the mean loss of a batch, int64 [accumulation, local_batch, seq_len + 1], and returns
    this loss.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler, timer: Timer) -> None:
        self._model, self._scaler, self._timer = model, scaler, timer

    def __call__(self, batch: Tensor) -> Tensor:
        total = torch.zeros((), device=batch.device)
        for local_batch in batch:
            with self._timer("forward"):
                loss = next_token_loss(self._model(local_batch[:, :-1]), local_batch[:, 1:]) / len(batch)
            with self._timer("backward"):
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += loss.detach()
        return total


class Pipelined:
    """Run the stages of one rank. The schedule's losses, over all local batches, add up to the mean.

    The call does as `Accumulating` does; without the last stage it returns None.
    """

    def __init__(
        self, schedule: PipelineScheduleSingle | PipelineScheduleMulti, timer: Timer, *, has_first: bool, has_last: bool
    ) -> None:
        self._schedule, self._timer = schedule, timer
        self._has_first, self._has_last = has_first, has_last

    def __call__(self, batch: Tensor) -> Tensor | None:
        losses = [loss for local_batch in batch for loss in self._pass(local_batch)]
        return torch.stack(losses).sum() if self._has_last else None

    def _pass(self, local_batch: Tensor) -> list[Tensor]:
        # Contiguous: before torch 2.13 the stages compare strides, too.
        inputs = (local_batch[:, :-1].contiguous(),) if self._has_first else ()
        target = local_batch[:, 1:] if self._has_last else None
        losses: list[Tensor] = []
        with self._timer("forward_backward"):
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]


ForwardBackward = Accumulating | Pipelined


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in float32 of `logits` [batch, seq, vocab] for `targets` [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
