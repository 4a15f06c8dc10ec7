"""Cut a Llama into pipeline stages, by layer.

A stage is the whole model without the layers of other stages. Layers keep their numbers and parameters their FQNs, so a
checkpoint does not depend on the cuts. An identity replaces a missing end (embedding, norm, output), so forward is the
same code. Stage s is on pipeline rank s modulo the number of pipeline ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchtitan_lite.config.job_config import JobConfig, Parallelism
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import counted

INTERLEAVED = "Interleaved1F1B"
INTERLEAVED_STAGES = 2
"""Stages on each rank with the interleaved schedule, if there are no split points."""


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `num_stages`, with the layers of `layers`."""

    index: int
    num_stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the logits, and so the loss."""
        return self.index == self.num_stages - 1


def build_stages(config: Parallelism, n_layers: int) -> list[Stage]:
    """Return all stages in order. Raise ConfigError if layers, ranks and schedule do not fit together."""
    degree, points = config.pipeline_parallel_degree, config.pipeline_parallel_split_points
    stages_per_rank = INTERLEAVED_STAGES if config.pipeline_parallel_schedule == INTERLEAVED else 1
    if not points:
        starts = _even_starts(n_layers, degree * stages_per_rank)
    else:
        starts = [0, *(_layer_number(point, n_layers) for point in points)]
        _check_number_of_stages(config, len(starts))
    layers = [range(start, stop) for start, stop in zip(starts, [*starts[1:], n_layers], strict=True)]
    if not all(layers):
        raise ConfigError(
            f"parallelism.pipeline_parallel_split_points: {','.join(points)} are not in ascending order. Sort them."
        )
    return [Stage(index, len(layers), held) for index, held in enumerate(layers)]


def cut_to_stage(model: nn.Module, stage: Stage) -> None:
    """Remove from `model`, a whole Llama, what is not in `stage`. The model should still be on the meta device."""
    layers = model.get_submodule("layers")
    for name, _ in list(layers.named_children()):
        if int(name) not in stage.layers:
            delattr(layers, name)
    missing = ([] if stage.is_first else ["tok_embeddings"]) + ([] if stage.is_last else ["norm", "output"])
    for name in missing:
        model.register_module(name, nn.Identity())


def num_microbatches(config: JobConfig) -> int:
    """Return the micro-batches in a local batch. Raise ConfigError unless it divides and fits the schedule."""
    parallelism, batch_size = config.parallelism, config.training.batch_size
    size, number = parallelism.pipeline_parallel_microbatch_size, parallelism.pipeline_parallel_microbatches
    divisor = size if number is None else number
    if batch_size % divisor:
        name = "microbatch_size" if number is None else "microbatches"
        fitting = ", ".join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)
        raise ConfigError(
            f"parallelism.pipeline_parallel_{name}: expected a divisor of training.batch_size {batch_size} "
            f"({fitting}), found {divisor}."
        )
    number = number or batch_size // size
    schedule, degree = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    needed = 1 if schedule == "GPipe" else degree
    if number < needed or (schedule == INTERLEAVED and number % degree):
        multiple = "a multiple of" if schedule == INTERLEAVED else "at least"
        raise ConfigError(
            f"parallelism.pipeline_parallel_schedule: {schedule} over {degree} ranks needs {multiple} {needed} "
            f"micro-batches, found {number}; set training.batch_size or pipeline_parallel_microbatch_size accordingly."
        )
    return number


def _even_starts(n_layers: int, num_stages: int) -> list[int]:
    if num_stages > n_layers:
        is_ = "is" if n_layers == 1 else "are"
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree: the model's {counted(n_layers, 'layer')} {is_} too few for "
            f"{num_stages} stages. Lower the degree."
        )
    each, rest = divmod(n_layers, num_stages)
    # Stages in the middle get the remaining layers first: the ends also have the embedding and the output.
    longer = [*range(1, num_stages - 1), 0][:rest]
    sizes = [each + (index in longer) for index in range(num_stages)]
    return [sum(sizes[:index]) for index in range(num_stages)]


def _layer_number(point: str, n_layers: int) -> int:
    name, _, number = point.partition(".")
    if name != "layers" or not number.isdecimal() or not 0 < int(number) < n_layers:
        raise ConfigError(
            f"parallelism.pipeline_parallel_split_points: expected names from layers.1 to layers.{n_layers - 1}, "
            f"found {point!r}."
        )
    return int(number)


def _check_number_of_stages(config: Parallelism, found: int) -> None:
    degree, schedule = config.pipeline_parallel_degree, config.pipeline_parallel_schedule
    fits = found % degree == 0 if schedule == INTERLEAVED else found == degree
    if not fits:
        expected = f"a multiple of {degree}" if schedule == INTERLEAVED else str(degree)
        raise ConfigError(
            f"parallelism.pipeline_parallel_split_points: {counted(found - 1, 'point')} for "
            f"{counted(found, 'stage')}; {schedule} with pipeline_parallel_degree {degree} needs {expected}."
        )
