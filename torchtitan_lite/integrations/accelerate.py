"""The manager for a loop with Hugging Face's accelerate, from what `Accelerator.prepare` returned.

    batches = Batches(loader)
    manager = for_accelerator(accelerator, model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=batches)

The rest is as in any loop. `Batches` takes the place of the prepared loader, and has its position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchtitan_lite.checkpoint import CheckpointManager, PerRank
from torchtitan_lite.checkpoint.state.rng import RngState
from torchtitan_lite.errors import ConfigError, ExtraMissing
from torchtitan_lite.integrations.loop_exit import warn_of_another_version

try:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.data_loader import DataLoaderAdapter
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ExtraMissing.of(error, "accelerate") from None

__all__ = ["Batches", "for_accelerator"]

TRIED = "1.15"
"""The versions of accelerate with which this was tried."""
_TRIED_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def for_accelerator(
    accelerator: Accelerator,
    *,
    model: Any,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    dataloader: Batches | None = None,
    states: Mapping[str, Any] | None = None,
    **keys: Any,
) -> CheckpointManager:
    """Return the manager of objects that `accelerator.prepare` returned; `keys` are those of `for_loop`.

    Several of a kind are a list. The gradient scaler is among the states, as `grad_scaler`. Raises ConfigError for a
    kind of parallelism that was not tried: one process and DDP were; accelerate shards nothing on a CPU, where FSDP
    could have been tried. **Collective**.
    """
    refuse_untried(accelerator)
    warn_of_another_version("accelerate", TRIED)
    scaler = accelerator.scaler
    return CheckpointManager.for_loop(
        model=model,
        optimizer=_unwrapped(optimizer, AcceleratedOptimizer, "optimizer"),
        lr_scheduler=_unwrapped(lr_scheduler, AcceleratedScheduler, "scheduler"),
        dataloader=None if dataloader is None else PerRank(dataloader),
        states={**(states or {}), **({} if scaler is None else {"grad_scaler": scaler})},
        **keys,
    )


def refuse_untried(accelerator: Accelerator) -> None:
    """Raise ConfigError for a kind of parallelism of `accelerator` with which this was not tried."""
    kind = accelerator.distributed_type
    if kind not in _TRIED_TYPES:
        raise ConfigError(
            f"accelerator: expected one process or DDP, found {kind.value}, which was not tried. "
            "Save with accelerate's own save_state there, or shard with FSDP2 in a loop of your own."
        )


def _unwrapped(given: Any, wrapper: type, name: str) -> Any:
    """Return what the wrappers of accelerate in `given`, one or several, have under `name`; others as they are."""
    if isinstance(given, Sequence):
        return [_unwrapped(each, wrapper, name) for each in given]
    return getattr(given, name) if isinstance(given, wrapper) else given


class Batches:
    """The batches of a loader that `Accelerator.prepare` returned: iterating yields the rest of its epoch.

    Iterating again yields the next epoch, whose number is `epoch`. The state is the position of the last batch that
    was yielded, and the generators from which the epoch's order was drawn; it is this rank's own. Random numbers that
    the dataset or the collator draws in this process are not those of an uninterrupted run: the loader fetches one
    batch ahead. Raises ConfigError for a loader of another kind.
    """

    def __init__(self, loader: Any) -> None:
        if not isinstance(loader, DataLoaderAdapter):
            raise ConfigError(
                f"dataloader: expected what Accelerator.prepare returned, found {type(loader).__qualname__}. "
                "Prepare the loader first."
            )
        if loader.use_stateful_dataloader:
            raise ConfigError(
                "dataloader: expected a loader without a state, found use_stateful_dataloader=True. Leave that out: "
                "Batches has the position."
            )
        self._loader = loader
        self._generators = _generators_of(loader)
        self._at_start = self._drawn_from()
        self.epoch = 0
        self.batch = 0
        """Number of batches of the epoch that were yielded."""

    def __iter__(self) -> Iterator[Any]:
        if self.batch < len(self._loader):
            for batch in self._rest() if self.batch else self._all():
                self.batch += 1
                yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._loader)

    def _all(self) -> Iterator[Any]:
        self._at_start = self._drawn_from()
        self._loader.set_epoch(self.epoch)
        return iter(self._loader)

    def _rest(self) -> Iterator[Any]:
        """Yield the batches that are left, in the earlier order; what is drawn for that is given back."""
        everything = RngState()
        now, drawn = everything.state_dict(), self._drawn_from()
        self._draw_from(self._at_start)
        rest = skip_first_batches(self._loader, self.batch)
        rest.set_epoch(self.epoch)
        iterator = iter(rest)
        first = next(iterator)
        self._draw_from(drawn)
        everything.load_state_dict(now)
        yield first
        yield from iterator

    def _drawn_from(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(each.get_state() for each in self._generators)]

    def _draw_from(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for generator, state in zip(self._generators, states[1:], strict=True):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "num_batches": len(self._loader),
            "at_start": dict(enumerate(self._at_start)),
            "generators": dict(enumerate(self._drawn_from()[1:])),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the position. Raises ConfigError if an epoch has another number of batches than when it was saved."""
        saved, found = state_dict["num_batches"], len(self._loader)
        if saved != found:
            raise ConfigError(
                f"dataloader: expected {saved} batches an epoch, as saved, found {found}. Use the data, batch size "
                "and number of processes of that run, or add dataloader to exclude_from_loading."
            )
        self.epoch, self.batch = state_dict["epoch"], state_dict["batch"]
        self._at_start = list(state_dict["at_start"].values())
        self._draw_from([torch.get_rng_state(), *state_dict["generators"].values()])


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators other than torch's own from which the loader and its samplers draw, each once."""
    owners, found = [loader.base_dataloader, loader.batch_sampler], [getattr(loader, "synchronized_generator", None)]
    while owners:
        owner = owners.pop(0)
        found.append(getattr(owner, "generator", None))
        owners += [each for name in ("batch_sampler", "sampler") if (each := vars(owner).get(name)) is not None]
    generators = list({id(each): each for each in found if each is not None}.values())
    if others := [each for each in generators if not isinstance(each, torch.Generator)]:
        raise ConfigError(
            f"dataloader: expected generators of torch in its samplers, found a {type(others[0]).__qualname__}, whose "
            "state Batches does not have. Draw the order from a torch.Generator."
        )
    return generators
