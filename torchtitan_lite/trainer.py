"""The training loop, and the objects that it uses.

A step takes this rank's share of the global batch, runs forward and backward over its micro-batches, checks that loss
and gradient norm are finite (every rank gets the same answer), and applies the update. Then every rank calls the
checkpoint manager, once a step.
"""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.resume.initial_import import ImportWeights
from torchtitan_lite.checkpoint.resume.restore import refuse_early
from torchtitan_lite.checkpoint.seams import Seams
from torchtitan_lite.checkpoint.state.rng import seed_all
from torchtitan_lite.checkpoint.state.stateful import Stateful
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.collection import no_collection
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.data.batch_size import global_batch_size
from torchtitan_lite.data.loader import Loader, build_dataloader
from torchtitan_lite.data.tokenizer import build_tokenizer
from torchtitan_lite.distributed.groups import counts_of
from torchtitan_lite.distributed.host_mismatch import HostView, alike, versions_and_config
from torchtitan_lite.distributed.peers import build_peers
from torchtitan_lite.distributed.process_group import World, shorten_timeouts
from torchtitan_lite.distributed.reduce import max_over_ranks, mean_over_ranks
from torchtitan_lite.divergence import DivergenceCheck
from torchtitan_lite.errors import TrainingDiverged
from torchtitan_lite.events import Diverged, Finished, Resumed
from torchtitan_lite.hugging_face.known_model import HuggingFaceModel
from torchtitan_lite.log import logger
from torchtitan_lite.metrics.announcement import announce, write_config
from torchtitan_lite.metrics.profiling import Profiler
from torchtitan_lite.metrics.run_metrics import EVENTS_FILE, RunMetrics
from torchtitan_lite.metrics.sample_trace import SampleTrace
from torchtitan_lite.models.llama.args import settings_of
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.hugging_face import describe
from torchtitan_lite.models.llama.model import Transformer, flops_per_token, num_params
from torchtitan_lite.optim import (
    apply_hyperparameters,
    build_lr_schedulers,
    build_optimizers,
    clip_grad_norm_,
)
from torchtitan_lite.parallelisms.footprint import footprint, held_parameters
from torchtitan_lite.parallelisms.forward_backward import ForwardBackward, build_forward_backward
from torchtitan_lite.parallelisms.parallelize_llama import parallelize_llama
from torchtitan_lite.parallelisms.pipeline_llama import Stage, cut_to_stage
from torchtitan_lite.parallelisms.plan import build_plan
from torchtitan_lite.preflight import refuse_shared_seed

if TYPE_CHECKING:
    from torchtitan_lite.hangs.watch import HangWatch


class Trainer:
    """One start of a run on this rank: from its configuration to its exit code. The constructor is **collective**.

    `began` is the reading of `time.monotonic` when this start began; None for now.
    """

    def __init__(self, config: JobConfig, world: World, *, began: float | None = None) -> None:
        self.config, self.world = config, world
        self.dump_folder = Path(config.job.dump_folder).absolute()
        self.peers = build_peers(config, simulated=world.is_simulated)
        # Before any exchange that not all ranks would come to, with another configuration or version.
        alike(lambda: versions_and_config(config), HostView, self.peers)
        seed = config.training.seed
        self.seed = self.peers.on_coordinator(lambda: random.SystemRandom().randrange(2**31) if seed is None else seed)
        self.tokenizer = self.peers.together(lambda: build_tokenizer(config.model.tokenizer_path))
        self.args = build_model_args(
            config.model, vocab_size=self.tokenizer.vocab_size, seq_len=config.training.seq_len
        )
        self.plan = self.peers.on_coordinator(lambda: build_plan(config, self.args, world.world_size))
        refuse_shared_seed(config, world.world_size)
        refuse_early(config, self.peers)
        self.global_batch_size = global_batch_size(config.training, self.plan.dims.dp_degree)
        self.mesh = self.plan.dims.build_mesh(world.device.type)
        self.num_params = num_params(self._on_meta())
        if config.checkpoint.dry_run:  # Before the data are opened, which this machine may not have.
            held = held_parameters(self.plan, self._build_part)
            logger.info("%s", footprint(self.plan, held, config.training, self.global_batch_size, self.num_params))
        self.loader = self._build_loader()
        # No other rank compares the stages that a simulated one leaves out.
        stages = self.plan.stages if world.is_simulated else self.plan.stages_of(world.rank)
        parts = {stage: self._build_part(stage) for stage in stages}
        self.model_parts = list(parts.values())
        self.optimizers = build_optimizers(self.model_parts, _as_built(config).optimizer)
        self.lr_schedulers = build_lr_schedulers(self.optimizers, config.lr_scheduler, config.training.steps)
        self.scaler = torch.amp.GradScaler(
            world.device.type, enabled=config.training.mixed_precision_param == "float16"
        )
        self.train_state = TrainState(
            loss_window=config.training.spike_window if config.training.spike_factor else 0,
            model=settings_of(self.args),
            records_model=bool(config.model.config_path),
        )
        self.measured: dict[str, Tensor] = {}
        self.divergence_check = self._build_divergence_check()
        flops = flops_per_token(self.args, self.num_params, config.training.seq_len)
        self.metrics = self.peers.together(lambda: RunMetrics(config, world, flops_per_token=flops, began=began))
        self.forward_backward = self._build_forward_backward(parts)
        self.checkpointer = self._build_checkpointer()
        self.watches = self._build_watches()
        self.samples = self._build_samples()
        # Each rank has its own dropout, and numbers of its own for user code. Seeded before the load, which restores
        # the generators of the run.
        seed_all(self.seed + world.rank)

    def run(self) -> int:
        """Train to the last step, or until a signal ends the run. Return the exit code. **Collective**."""
        announce(
            self.config,
            self.world,
            topology=str(self.plan.dims),
            num_params=self.num_params,
            seed=self.seed,
            only_loads=self._only_loads,
        )
        if self.config.checkpoint.dry_run:
            return self._report_start()
        self.checkpointer.open()  # Takes the lease, before any write into the folder: another job may be using it.
        if not self._only_loads:
            self.peers.on_coordinator(lambda: write_config(self.dump_folder, self.config))
        with self.metrics, self.checkpointer, closing(self.samples):
            if self.config.checkpoint.create_seed_checkpoint:
                self.checkpointer.save(0, force=True)
                return 0
            self.checkpointer.finish_ended()
            if ended := self.checkpointer.ended():
                logger.info("Training completed: %s", ended.summary(self.config.training.steps))
                self.metrics.note(Finished(ended.step))
                return 0
            self.metrics.begin(str(self.plan.dims))
            with self.metrics.part("loading"):
                has_loaded = self.checkpointer.load()
            if has_loaded:
                self._resume()
            return self._left() or (self._finish() if self._has_no_step_left() else self._train())

    def _described(self) -> HuggingFaceModel | None:
        """Return the model as transformers knows it, if the run ends in that format."""
        if not self.config.checkpoint.last_save_in_hf:
            return None
        model = describe(self.args, self.tokenizer.files(), self.tokenizer.bos, self.tokenizer.eos)
        return dataclasses.replace(model, tokenizer=self.tokenizer.fingerprint)

    def _importer(self) -> ImportWeights | None:
        if not self.config.checkpoint.initial_load_in_hf:
            return None
        # Imported only where it is used: no other start waits for it.
        from torchtitan_lite.models.llama.imported import open_expected, write_llama

        return lambda path, out: write_llama(open_expected(path, self.args), out).notes

    def _report_start(self) -> int:
        """Log whether the run would end, resume, import weights or start from scratch; return the exit code."""
        manager, steps = self.checkpointer, self.config.training.steps
        if ended := manager.ended():
            logger.info("It would end at once. Training completed: %s", ended.summary(steps))
            return 0
        if manager.lacks_only_hugging_face():
            logger.info("Nothing is left to train, but the weights would be written in Hugging Face's format")
            return 0
        if source := manager.would_import():
            from torchtitan_lite.models.llama.imported import open_expected

            self.peers.on_coordinator(lambda: open_expected(source, self.args).chosen.notes)
            logger.info("It would import %s as step 0 into %s, and start from there", source, self.dump_folder)
            return 0
        report = manager.dry_run()
        logger.info("%s", report or f"No checkpoint in {self.dump_folder}: it would be a fresh start")
        if report is not None and report.step >= steps and not report.refusals:
            export = ", but its weights would be exported" if self.config.checkpoint.export_folder else ""
            logger.info("Nothing is left to train after step %d%s", report.step, export)
        return 1 if report is not None and report.refusals else 0

    def _resume(self) -> None:
        state = self.train_state
        apply_hyperparameters(self.optimizers, self.lr_schedulers, self.config.optimizer)
        self.metrics.ledger.resume(state.run_seconds, state.productive_seconds)
        if state.step:
            self.metrics.note(Resumed(state.step))

    def _train(self) -> int:
        config, state = self.config, self.train_state
        for part in self.model_parts:
            part.train()
        self.metrics.start(state.step)
        self._start_samples()
        logger.info(
            "Training starts at step %d, with local batch size %d, global batch size %d, sequence length %d, total "
            "steps %d (warmup %d)",
            state.step + 1,
            config.training.batch_size,
            self.global_batch_size,
            config.training.seq_len,
            config.training.steps,
            config.lr_scheduler.warmup_steps,
        )
        first = state.step + 1
        self.checkpointer.reset()
        with (
            Profiler(self.dump_folder, config.profiling, rank=self.world.rank, loaded_step=state.step) as profiler,
            no_collection(),  # Pauses of ranks at different moments would add up. The loop collects.
            ExitStack() as watched,
        ):
            for watch in self.watches:
                watched.enter_context(watch)
            while state.step < config.training.steps:
                for watch in self.watches:
                    watch.step(state.step + 1)
                epoch = self.loader.progress.epoch
                batch = self._next_batch()
                if batch is None:
                    return self._end_of_data()
                state.step += 1
                if self.loader.progress.epoch != epoch:
                    logger.info("Epoch %d of the data begins in step %d", self.loader.progress.epoch, state.step)
                if state.step % config.training.gc_freq == 0:
                    gc.collect(1)
                try:
                    with self.metrics.ledger.step(state.step):
                        self._train_step(batch)
                except TrainingDiverged as error:
                    self._roll_back(error)
                    if left := self._left():
                        return left
                    continue
                with self._unwatched():  # It may write a trace.
                    profiler.step()
                self._note_progress()
                faults.point("step", step=state.step)
                is_last = state.step == config.training.steps
                with self._saving():
                    self.checkpointer.save(state.step, force=is_last, metrics=self.measured)
                if left := self._left():
                    return left
                if state.step == first:
                    shorten_timeouts(self.mesh, config.comm)
        return self._completed()

    def _start_samples(self) -> None:
        self.samples.close()  # Where the run rolled back by itself: the file is replaced.
        if not self._only_loads:
            # No rank may log its samples before the coordinator has dropped the later lines of the files.
            self.peers.on_coordinator(lambda: self.samples.start(self.train_state.step))

    def _roll_back(self, error: TrainingDiverged) -> None:
        """Roll back to the latest good checkpoint, if the run is to. Raises `error` if not, or if it may not again."""
        config = self.config.training
        if config.on_divergence != "rollback":
            self.metrics.note(Diverged(error.step, reason=error.reason))
            raise error
        with self.metrics.part("loading"), self._unwatched():
            self.checkpointer.roll_back(
                error.step,
                error.reason,
                max_rollbacks=config.max_rollbacks,
                within_steps=config.rollback_window,
            )
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            apply_hyperparameters(self.optimizers, self.lr_schedulers, self.config.optimizer)
            self.divergence_check = self._build_divergence_check()
            self.metrics.rolled_back(error.step, self.train_state.step)
            self._start_samples()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Count the block as saving; it may take as long as it needs."""
        with self.metrics.part("saving"), self._unwatched():
            yield

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Do not count the time of the block as that of a step: it may take as long as it needs."""
        with ExitStack() as paused:
            for watch in self.watches:
                paused.enter_context(watch.paused())
            yield

    def _has_no_step_left(self) -> bool:
        return self.train_state.step >= self.config.training.steps or self.loader.has_ended

    def _finish(self) -> int:
        """Save what a run at its last step still lacks, such as its export, without training. Return the exit code."""
        logger.info("Nothing is left to train after step %d", self.train_state.step)
        with self.metrics.part("saving"):
            self.checkpointer.finish(self.train_state.step)
        return self._completed()

    def _completed(self) -> int:
        logger.info("Training completed")
        self.metrics.note(Finished(self.train_state.step))
        return 0

    def _left(self) -> int:
        """Return the exit code if the ranks agreed to leave; 0 if they did not."""
        return 128 + self.checkpointer.preempted_by if self.checkpointer.preempted_by else 0

    def _note_progress(self) -> None:
        ledger, state = self.metrics.ledger, self.train_state
        state.run_seconds, state.productive_seconds = ledger.run_seconds, ledger.productive_seconds
        self.samples.log(state.step, self.loader.last_positions)

    def _train_step(self, batch: Tensor) -> None:
        """Train on `batch`, this rank's share of the step: int64 [accumulation, local_batch, seq_len + 1]."""
        loss = self.forward_backward(batch.to(self.world.device))
        with self.metrics.timer("optimizer"):
            average = mean_over_ranks(loss, self.world.device)
            self.divergence_check.loss(average)
            lr = float(self.lr_schedulers[0].get_last_lr()[0])
            grad_norm = self._update()
        self.train_state.n_tokens_seen += self.global_batch_size * self.config.training.seq_len
        self.measured = {"loss": average, "grad_norm": grad_norm}
        self._log(loss, average, grad_norm, lr)

    def _update(self) -> Tensor:
        """Apply the gradients, unless the gradient scaler finds that they overflowed. Return their norm."""
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        pipeline = self.mesh.get_group("pp") if self.plan.dims.pp > 1 else None
        grad_norm = clip_grad_norm_(self.model_parts, self.config.training.max_norm, pipeline=pipeline)
        self.divergence_check.grad_norm(grad_norm)
        with self._saving():
            self.checkpointer.maybe_wait_for_staging()
        for optimizer, scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            self.scaler.step(optimizer)
            optimizer.zero_grad()
            scheduler.step()
        self.scaler.update()
        return grad_norm

    def _log(self, loss: Tensor | None, average: Tensor, grad_norm: Tensor, lr: float) -> None:
        step = self.train_state.step
        tokens = self.global_batch_size * self.config.training.seq_len / self.world.world_size
        self.metrics.step_done(tokens, average.item())
        if step == 1 or step % self.config.metrics.log_freq == 0:
            global_avg, global_max = average.item(), max_over_ranks(loss, self.world.device).item()
            self.train_state.record_loss(global_avg, global_max)
            figures = {
                "loss_metrics/global_avg_loss": global_avg,
                "loss_metrics/global_max_loss": global_max,
                "grad_norm": grad_norm.item(),
                "lr": lr,
                "n_tokens_seen": self.train_state.n_tokens_seen,
            }
            self.metrics.log(step, figures, self.loader.progress)

    def _next_batch(self) -> Tensor | None:
        with self.metrics.waiting_for_data():
            for _ in range(self.checkpointer.batches_to_skip(self.train_state.step + 1)):
                next(self.loader, None)
            return next(self.loader, None)

    def _end_of_data(self) -> int:
        step = self.train_state.step
        logger.info("The data ends after step %d (training.max_epochs)", step)
        with self._saving():
            self.checkpointer.save(step, force=True, metrics=self.measured)
        return self._completed()

    @property
    def _only_loads(self) -> bool:
        """Whether this run may write nothing: the folder may belong to another job, or be read-only."""
        return self.config.checkpoint.enable_checkpoint and self.config.checkpoint.load_only

    def _build_loader(self) -> Loader:
        dims = self.plan.dims
        rank, num_ranks = dims.dp_rank(self.world.rank), dims.dp_degree
        return alike(
            lambda: build_dataloader(self.config, self.tokenizer, seed=self.seed, rank=rank, num_ranks=num_ranks),
            # A dry run has not read the data, which its machine may be without.
            lambda loader: HostView() if self.config.checkpoint.dry_run else loader.view(),
            self.peers,
        )

    def _build_checkpointer(self) -> CheckpointManager:
        states: dict[str, Stateful] = {"train_state": self.train_state}
        if self.scaler.is_enabled():
            states["grad_scaler"] = self.scaler
        return CheckpointManager(
            self.loader,
            self.model_parts,
            self.optimizers,
            self.lr_schedulers,
            states,
            self.config,
            seams=Seams(peers=self.peers, on_event=self.metrics.on_event, past=self.metrics.past),
            topology=str(self.plan.dims),
            hugging_face=self._described(),
            import_weights=self._importer(),
        )

    def _build_forward_backward(self, parts: Mapping[Stage, Transformer]) -> ForwardBackward:
        config, rank = self.config, self.world.rank
        return build_forward_backward(
            config,
            self.plan,
            self.args,
            [parts[stage] for stage in self.plan.stages_of(rank)],
            self.mesh,
            rank=rank,
            accumulation=self.global_batch_size // (config.training.batch_size * self.plan.dims.dp_degree),
            scaler=self.scaler,
            timer=self.metrics.timer,
            device=self.world.device,
        )

    def _build_samples(self) -> SampleTrace:
        traces = self.config.training.trace_samples and self.plan.dims.takes_data_first(self.world.rank)
        return SampleTrace(self.dump_folder, rank=self.world.rank, writes=traces and not self._only_loads)

    def _build_divergence_check(self) -> DivergenceCheck:
        return DivergenceCheck(self.config.training, self.train_state, skips_steps=self.scaler.is_enabled())

    def _build_watches(self) -> Sequence[HangWatch]:
        comm = self.config.comm
        if comm.hang_seconds == 0 or self.config.checkpoint.dry_run:
            return []
        from torchtitan_lite.hangs.watch import HangWatch

        watch = HangWatch(
            comm.hang_seconds,
            self.peers,
            counts_of(self.mesh),
            events=None if self._only_loads else self.dump_folder / EVENTS_FILE,
            ignored_signals=self.config.checkpoint.preemption_signals,
            gives_up_seconds=comm.train_timeout_seconds,
        )
        return [watch]

    def _build_part(self, stage: Stage) -> Transformer:
        config = _as_built(self.config)
        model = self._on_meta()
        cut_to_stage(model, stage)
        parallelize_llama(model, self.mesh, self.plan.dims, config)
        if config.checkpoint.dry_run:
            return model  # Names, shapes and shards are all that a dry run compares, and these need no memory.
        model.to_empty(device="cpu" if config.training.enable_cpu_offload else self.world.device)
        model.init_weights(self.seed, buffer_device=self.world.device)
        return model

    def _on_meta(self) -> Transformer:
        with torch.device("meta"):
            return Transformer(self.args)


def _as_built(config: JobConfig) -> JobConfig:
    """Return `config`; of a dry run, without compilation, fused kernels and, with simulated ranks, CPU offload."""
    if not config.checkpoint.dry_run:
        return config
    # Offloading needs an accelerator, which the machine of simulated ranks may lack and those of real ones must have.
    offloads = config.training.enable_cpu_offload and not config.comm.simulated_ranks
    training = dataclasses.replace(config.training, compile=False, enable_cpu_offload=offloads)
    # Not fused: torch has no fused kernels for the meta device.
    optimizer = dataclasses.replace(config.optimizer, implementation="foreach")
    return dataclasses.replace(config, training=training, optimizer=optimizer)
