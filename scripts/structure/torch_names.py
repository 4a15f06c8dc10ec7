"""What `torchtitan_lite/torch_private.py` uses of torch, and what is done where torch has it no more."""

from __future__ import annotations

from collections.abc import Mapping

_STORE = "torch.distributed.checkpoint"
_FSDP1 = "torch.distributed.fsdp.FullyShardedDataParallel"
_FSDP2 = "torch.distributed.fsdp.FSDPModule"
_NO_GRADIENTS = "gradients that FSDP2 has not reduced are not noticed"
_NO_ORDER = "parameters of FSDP1 in another memory format are not refused"

NAMES: Mapping[str, str] = {
    f"{_STORE}.filesystem._StorageInfo": "ImportError: no checkpoint can be written or read",
    "torch.Tensor._version": "a change of a tensor that no checkpoint has is not noticed",
    "torch.autograd._unsafe_preserve_version_counter": "a backward pass around the first save may raise",
    "torch.Tensor().__create_chunk_list__": "the tensor is one part, as its placements say",
    "torch.Tensor().__get_tensor_shard__": "AttributeError: it goes with __create_chunk_list__",
    "torch.storage.TypedStorage": "deprecated; ImportError: no item can be written",
    "torch.storage.TypedStorage._pickle_storage_type": "AttributeError: no item can be written",
    "torch.nn.Module._load_from_state_dict": "AttributeError: no module can be loaded",
    "torch.nn.Module()._load_state_dict_pre_hooks": "views are cloned as if there were a hook",
    "torch.nn.Module()._buffers": "AttributeError: no module can be loaded",
    "torch.nn.Module()._non_persistent_buffers_set": "a change of an unsaved buffer is not noticed",
    "torch.nn.Module().state_dict()._metadata": "a module is tried without its version",
    "torch.jit.ScriptModule": "deprecated; no module is one",
    "torch.utils.data.DataLoader()._iterator": "workers that only gave a state are left to torch",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter()._workers": "workers are left to torch",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "AttributeError at the first save after a load",
    "torch.utils.data.dataloader._BaseDataLoaderIter()._base_seed": "a seed drawn late is not noticed",
    "torch.utils.data.dataloader._BaseDataLoaderIter()._sampler_iter": "an order drawn late is not noticed",
    "torch.utils.data.dataloader._BaseDataLoaderIter()._num_yielded": "neither is noticed",
    "torch.optim.Optimizer()._optimizer_step_pre_hooks": "hooks run at the step that only makes states",
    "torch.optim.Optimizer()._optimizer_step_post_hooks": "the same",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "the same",
    "torch.optim.optimizer._global_optimizer_post_hooks": "the same",
    "torch.optim.lr_scheduler.SequentialLR()._schedulers": "the class alone identifies a scheduler",
    "torch.optim.lr_scheduler.LRScheduler()._last_lr": "get_last_lr is right from the next step on",
    "torch._dynamo.eval_frame.OptimizedModule": "AttributeError for a compiled module",
    "torch._dynamo.eval_frame.OptimizedModule()._orig_mod": "AttributeError for a compiled module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "ImportError if a block is wrapped",
    f"{_FSDP1}.state_dict_type": "deprecated; AttributeError for a module of FSDP1",
    f"{_FSDP1}()._fsdp_wrapped_module": "AttributeError for a module of FSDP1",
    f"{_FSDP1}()._device_mesh": "a module of FSDP1 is refused as one without a mesh",
    f"{_FSDP1}()._handle": _NO_ORDER,
    f"{_FSDP1}()._handle.flat_param": _NO_ORDER,
    f"{_FSDP1}()._handle.flat_param._fqns": _NO_ORDER,
    f"{_FSDP1}()._handle.flat_param._contiguities": _NO_ORDER,
    f"{_FSDP1}()._unshard_params_ctx": "a state dict that fails leaves parameters unsharded",
    f"{_FSDP2}._get_fsdp_state": _NO_GRADIENTS,
    f"{_FSDP2}._get_fsdp_state()._fsdp_param_group": _NO_GRADIENTS,
    f"{_FSDP2}._get_fsdp_state()._fsdp_param_groups": "_fsdp_param_group is used",
    f"{_FSDP2}._get_fsdp_state()._fsdp_param_groups[].fsdp_params": _NO_GRADIENTS,
    f"{_FSDP2}._get_fsdp_state()._fsdp_param_groups[].fsdp_params[]._unsharded_param": _NO_GRADIENTS,
    f"{_FSDP2}._get_fsdp_state()._fsdp_param_groups[].fsdp_params[].unsharded_accumulated_grad": _NO_GRADIENTS,
    "torch.distributed.distributed_c10d._set_pg_timeout": "the public set_timeout is used",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": "a rank that hangs is found by state and stack",
    "torch.testing._internal.distributed.fake_pg": "simulated ranks are refused by name",
    "torch.cuda.memory._record_memory_history": "AttributeError with profiling.enable_memory_snapshot",
    "torch.cuda.memory._snapshot": "AttributeError with profiling.enable_memory_snapshot",
    "torch.ops.aten._scaled_dot_product_flash_attention": "its results are computed again in backward",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "its results are computed again in backward",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "its results are computed again in backward",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "its results are computed again",
    "torch.ops._c10d_functional": "its results are computed again in backward",
}
"""Every private or deprecated name of torch that is used in that module, and what is done where it is missing.

In full; behind a call or an index stands an attribute that only objects have."""
SOME_VERSIONS = {
    f"{_FSDP2}._get_fsdp_state()._fsdp_param_group": "2.11",
    f"{_FSDP2}._get_fsdp_state()._fsdp_param_groups": "2.12 to 2.15",
    "torch.distributed.distributed_c10d._set_pg_timeout": "2.11 to 2.13",
}
"""Those of the supported and tried versions, 2.11 to 2.15, that have a name which others have not."""
