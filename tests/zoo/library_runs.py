"""Runs of other libraries: the optimizers of an installed package, found by introspection, and its low bits.

An optimizer is built with its defaults, or as its documentation says, where these do not do. Nothing here imports a
library at its own import: each runs in processes of its own.
"""

from __future__ import annotations

import importlib
import inspect
import random
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.zoo.tricks import WIDTH, Step, Trick, mesh

HIDDEN = 128
"""Wide enough that a matrix gets a state of low bits, of which libraries make none for a few thousand elements."""
NUM_STEPS = 8
"""Of an optimizer that wants to know."""
LIBRARIES = {
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "pytorch_optimizer": "pytorch_optimizer",
    "timm": "timm.optim",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "heavyball": "heavyball",
    "torch-optimi": "optimi",
    "torch-optimizer": "torch_optimizer",
    "flashoptim": "flashoptim",
    "torch-shampoo": "distributed_shampoo",
    "dion": "dion",
    "muon-optimizer": "muon",
    "muon-fsdp2": "muon_fsdp2",
    "muonium": "muonium",
    "dtensor-muon": "dtensor_muon",
    "galore-torch": "galore_torch",
    "q-galore-torch": "q_galore_torch",
    "apollo-torch": "apollo_torch",
    "adam-mini": "adam_mini",
    "adabelief-pytorch": "adabelief_pytorch",
    "came-pytorch": "came_pytorch",
    "lion-pytorch": "lion_pytorch",
    "lomo-optim": "lomo_optim",
    "sophia-opt": "sophia_opt",
    "deepspeed": "deepspeed.ops.adam",
    "transformer-engine": "transformer_engine.pytorch.optimizers",
}
"""By the name of each package, the module that has its optimizers. Without an entry, they have one name."""

Build = Callable[[Any, nn.Module], Any]
"""Return an optimizer, or several, from a class and the model."""

WITH_CLOSURE = {
    *("SAM", "GSAM", "LookSAM", "FriendlySAM", "WSAM", "BSAM", "SAMWrapper", "MSAMLaProp", "AliG"),
    *("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"),
}
WITH_GRAPH = {"AdaHessian", "Adahessian", "adahessian", "SophiaH"}
"""Classes that differentiate gradients."""


def _matrices(module: nn.Module) -> list[Tensor]:
    return [each for each in module.parameters() if each.ndim == 2]


def _vectors(module: nn.Module) -> list[Tensor]:
    return [each for each in module.parameters() if each.ndim != 2]


def matrices_only(kind: Any, module: nn.Module) -> list[Any]:
    """Return an optimizer of the matrices, and torch's AdamW for the rest."""
    return [kind(_matrices(module), lr=0.01), torch.optim.AdamW(_vectors(module), lr=0.01)]


def with_flags(kind: Any, module: nn.Module) -> Any:
    """Return an optimizer that takes Muon for the matrices, as their flag says."""
    return kind([{"params": _matrices(module), "use_muon": True}, {"params": _vectors(module), "use_muon": False}])


def with_algorithms(kind: Any, module: nn.Module) -> Any:
    """Return an optimizer that takes AdamW for what is no matrix, as the group says."""
    groups = [{"params": _matrices(module)}, {"params": _vectors(module), "algorithm": "adamw"}]
    return kind(**arguments_of(kind, module) | {"params": groups})


def shampoo(kind: Any, module: nn.Module) -> Any:
    types = importlib.import_module("distributed_shampoo")
    sharded = isinstance(next(module.parameters()), DTensor)
    how = types.FullyShardDistributedConfig if sharded else types.SingleDeviceDistributedConfig
    return kind(module.parameters(), lr=0.01, distributed_config=how())


def low_rank(kind: Any, module: nn.Module, lr: float | None = 0.01, **settings: Any) -> Any:
    settings = {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std", **settings}
    return kind([{"params": _matrices(module), **settings}, {"params": _vectors(module)}], lr=lr)


def apollo(kind: Any, module: nn.Module) -> Any:
    return low_rank(kind, module, proj="random", scale_type="channel")


def of_parameters(kind: Any, module: nn.Module, **settings: Any) -> Any:
    """Return an optimizer that needs a learning rate, or does not name its arguments."""
    return kind([*module.parameters()], lr=0.01, **settings)


def split(kind: Any, module: nn.Module) -> Any:
    adam = importlib.import_module("heavyball").AdamW
    return kind([{"params": _matrices(module), "optimizer": adam}, {"params": _vectors(module), "optimizer": adam}])


DION = ("Dion", "Dion2", "Dion3", "DionReference", "DionSimple", "Muon", "MuonReference", "NorDion2", "NorMuon")
BUILDS: dict[tuple[str, str], Build] = {
    ("torch-shampoo", "DistributedShampoo"): shampoo,
    **{("dion", each): with_algorithms for each in DION},
    **{(package, each): with_algorithms for package in ("muonium", "dtensor-muon") for each in ("Muon", "MuonLP")},
    ("dtensor-muon", "MuonForeach"): with_algorithms,
    ("muon-optimizer", "Muon"): matrices_only,
    ("muon-optimizer", "SingleDeviceMuon"): matrices_only,
    ("muon-optimizer", "MuonWithAuxAdam"): with_flags,
    ("muon-optimizer", "SingleDeviceMuonWithAuxAdam"): with_flags,
    ("muon-fsdp2", "Muon"): with_flags,
    **{("pytorch_optimizer", each): with_flags for each in ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "NorMuon")},
    ("pytorch_optimizer", "MuonClip"): with_flags,
    ("pytorch_optimizer", "SpectralSphere"): matrices_only,
    ("galore-torch", "GaLoreAdamW"): low_rank,
    ("galore-torch", "GaLoreAdamW8bit"): low_rank,
    ("galore-torch", "GaLoreAdafactor"): partial(low_rank, lr=None),
    ("apollo-torch", "APOLLOAdamW"): apollo,
    ("heavyball", "SplitOpt"): split,
    ("came-pytorch", "CAME"): of_parameters,
    ("deepspeed", "ZenFlowCPUAdam"): of_parameters,
    ("deepspeed", "ZenFlowSelectiveAdamW"): of_parameters,
    ("deepspeed", "ZenFlowSelectiveAdamW_stage3"): of_parameters,
    **{("bitsandbytes", f"SGD{bits}"): partial(of_parameters, momentum=0.9) for bits in ("", "8bit", "32bit")},
    **{("bitsandbytes", f"LARS{bits}"): partial(of_parameters, momentum=0.9) for bits in ("", "8bit", "32bit")},
    ("pytorch_optimizer", "AdaShift"): partial(of_parameters, keep_num=3),  # Ten steps change nothing, by default.
}
"""How to build what does not take parameters and defaults."""


def _is_offered_class(name: str, value: Any) -> bool:
    is_kind = isinstance(value, type) and callable(getattr(value, "step", None)) and hasattr(value, "zero_grad")
    is_kind = is_kind and not inspect.isabstract(value)
    return is_kind and not value.__module__.startswith("torch.") and not name.startswith("_") and "Base" not in name


def names_of(rank: int, package: str) -> list[str]:
    """Return the names of what the installed `package` has; raises what its import raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(LIBRARIES.get(package, package))
    if package == "timm":  # Its classes and their variants, as its own factory names them.
        return [*map(str, module.list_optimizers(exclude_filters=["bnb*", "fused*"])), "lookahead_adamw"]
    found = [name for name in sorted(dir(module)) if _is_offered_class(name, getattr(module, name))]
    return [*found, *MODELS.get(package, {})]


def _float8(model: nn.Sequential) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name == "2")


def _nf4(model: nn.Sequential) -> nn.Module:
    from torchao.quantization import to_nf4

    # Blocks of blocks that two ranks can share.
    model[2].weight = nn.Parameter(to_nf4(model[2].weight.detach(), 64, 64), requires_grad=False)
    return model


def _of_bitsandbytes(kind: str) -> Callable[[nn.Sequential], nn.Module]:
    def change(model: nn.Sequential) -> nn.Module:
        layers = importlib.import_module("bitsandbytes.nn")
        base = getattr(layers, kind)(HIDDEN, HIDDEN, **({"has_fp16_weights": False} if "8bit" in kind else {}))
        with torch.no_grad():  # The same in each start, as what a run begins from.
            base.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
            base.bias.zero_()
        model[2] = base.requires_grad_(False).to("cpu")
        return model

    return change


MODELS: Mapping[str, Mapping[str, Callable[[Any], nn.Module]]] = {
    "torchao": {"float8 training, emulated": _float8, "a frozen base in NF4": _nf4},
    "bitsandbytes": {f"a frozen base of {kind}": _of_bitsandbytes(kind) for kind in ("Linear8bitLt", "LinearNF4")},
}
"""What a package makes of a model, which torch's AdamW trains."""


class LibraryRun(Trick):
    """A few layers, trained by a class of a library: plain in one process, under FSDP2 on several."""

    options: ClassVar[dict[str, Any]] = {"max_failed_saves": 1}

    def __init__(self, package: str, name: str, rank: int, seed: int) -> None:
        self.package, self.name, self.rank = package, name, rank
        self.module = self.build(seed)
        made = self._optimizers()
        self.optimizers = made if isinstance(made, list) else [made]
        for each in self.optimizers:
            with suppress(AttributeError):  # Of free schedules, and of what wraps them or others.
                each.train()  # type: ignore[attr-defined]

    def build(self, seed: int) -> nn.Module:
        for seeds in (random.seed, numpy.random.seed, torch.manual_seed):
            seeds(seed)
        model: nn.Module = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)
        )
        if change := MODELS.get(self.package, {}).get(self.name):
            model = change(model)
        if dist.is_initialized():
            fully_shard(model, mesh=mesh(dist.get_world_size()))
        return model

    def _optimizers(self) -> Any:
        package, name = self.package, self.name
        if name in MODELS.get(package, {}):
            return torch.optim.AdamW([each for each in self.module.parameters() if each.requires_grad], lr=0.01)
        module = importlib.import_module(LIBRARIES.get(package, package))
        if package == "timm":
            return module.create_optimizer_v2(self.module, opt=name, lr=0.01)
        kind = getattr(module, name)
        if build := BUILDS.get((package, name)):
            return build(kind, self.module)
        return kind(**arguments_of(kind, self.module))

    def step(self, number: int, wait: Step) -> float:
        @torch.enable_grad()
        def evaluate() -> Tensor:
            for each in self.optimizers:
                each.zero_grad()
            loss = self.loss(number)
            loss.backward(create_graph=self.name in WITH_GRAPH)  # type: ignore[no-untyped-call]  # torch's gap
            return loss

        first: Any = self.optimizers[0]
        if hasattr(first, "fused_backward"):  # It steps within the backward pass.
            loss = self.loss(number)
            wait()
            first.fused_backward(loss, 0.01)
            return float(loss.detach())
        loss = evaluate()
        wait()
        for each in self.optimizers:
            each.step(evaluate) if self.name in WITH_CLOSURE else each.step()  # type: ignore[arg-type]  # a tensor, as torch's
        return float(loss.detach())

    def contents(self) -> dict[str, Any]:
        states = [dict(each.state_dict()) for each in self.optimizers]
        for each in states:
            if isinstance(each.get("state"), dict):  # A look at the state of a parameter makes an empty one.
                each["state"] = {key: held for key, held in each["state"].items() if held or not isinstance(held, dict)}
        return {"model": _plain(dict(self.module.state_dict())), "optimizers": _plain(states)}


def arguments_of(kind: type, module: nn.Module) -> dict[str, Any]:
    """Return values for the arguments that `kind` requires, and for a mesh if the model is sharded."""
    known: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("params", "parameters", "model_params"), lambda: [*module.parameters()]),
        "named_parameters": lambda: [*module.named_parameters()],
        "model": lambda: module,
        "optimizer": lambda: torch.optim.AdamW(module.parameters(), lr=0.01),
        "base": lambda: torch.optim.SGD(module.parameters(), lr=0.01),
        "base_optimizer": lambda: torch.optim.AdamW,
        "lr": lambda: 0.01,
        "num_iterations": lambda: NUM_STEPS,
        "num_data": lambda: 4,
    }
    asked = inspect.signature(kind).parameters.values()
    given = {each.name: known[each.name]() for each in asked if each.default is each.empty and each.name in known}
    first = next(module.parameters())
    if isinstance(first, DTensor):
        # torch's foreach kernels are not made for DTensors, and without a mesh Dion takes a shard for the matrix.
        sharded = {"foreach": False, **dict.fromkeys(("distributed_mesh", "outer_shard_mesh"), first.device_mesh)}
        given |= {each.name: sharded[each.name] for each in asked if each.name in sharded}
    return given


def _plain(value: Any) -> Any:
    """Return a nest with complete tensors, and for those that are made of others with these. **Collective**.

    A load gives a state the placements of its parameter, if it has its shape, and some libraries replicate it: equal
    values, so only these are compared.
    """
    if isinstance(value, DTensor):
        local = value.to_local()
        return _plain(local if hasattr(local, "__tensor_flatten__") else value.full_tensor())
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        inner = {name: _plain(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
        return {"class": type(value).__name__, **inner}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
