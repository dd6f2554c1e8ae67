"""Everything private to transformers that continuous batching through wavefill leans on, in this one file.

What is done to a model, and undone by `uninstall`:

- `model.init_continuous_batching`, the one door to all three ways into continuous batching, is covered on the instance.
  While a manager lives, the model's attention carries a name that holds "flash", since a manager builds masks for any
  other name or refuses it; `generate` goes on to work under that name. Nothing of transformers itself is patched, and
  the name is put into the configuration directly, so that the process-wide table of flash-attention functions, which
  other models use, is never touched.
- The decode path with block tables is switched on for the manager: transformers does that for FlashAttention on a GPU
  only, and the function registered here reads pages anywhere.
- On a GPU the manager pads its batches, captures them in CUDA graphs and prepares the next one while one runs, as with
  FlashAttention. On the CPU it must not, even where there is a GPU that the model is not on.
- Forward hooks mark a paged forward pass, so that no mask is built for it and no attention call of it goes astray.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Any
from weakref import WeakSet

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from wavefill.integrations.transformers.continuous.call import MARKS, Pass, set_current
from wavefill.integrations.transformers.continuous.contract import PARAM, Contract, Shape
from wavefill.integrations.transformers.continuous.detect import detect, gpu_releases, refusal
from wavefill.integrations.transformers.current import untraced
from wavefill.integrations.transformers.names import BATCHED, SCHEDULE, plain_name, previous_of
from wavefill.integrations.transformers.support import HYBRIDS, decoder_of
from wavefill.spec import BackendUnavailable, UnsupportedModel, complaint, invalid

_PACKAGE = "transformers.generation.continuous_batching"

#: Blocks a request may have in the decode path when neither the caller nor the workload says: enough for the model's
#: positions, up to what a table row for each token of a batch may cost. transformers' own 32 end at 8,192 tokens.
_FEWEST_BLOCKS, _MOST_BLOCKS = 32, 1024

_OPEN = "init_continuous_batching"
_ENTRY = frozenset({"generation_config", "continuous_batching_config", "workload_hints"})
_managers: WeakSet[Any] = WeakSet()
_contracts: dict[tuple[str, type], Contract] = {}


# -- what is there -------------------------------------------------------------------------------------------------

def contract_of(model: PreTrainedModel) -> Contract:
    """The contract between the installed transformers and `model`; `BackendUnavailable` when it is no tested one."""
    key = (installed(), type(model))
    if key not in _contracts:
        _contracts[key] = detect(installed(), _shape(model))
    return _contracts[key]


def installed() -> str:
    """The release of transformers that this process runs."""
    return str(transformers.__version__)


def _shape(model: PreTrainedModel) -> Shape:
    try:
        cache = importlib.import_module(f"{_PACKAGE}.cache").PagedAttentionCache
        call = importlib.import_module(f"{_PACKAGE}.input_outputs").PagedAttentionArgs
        initialization = importlib.import_module(f"{_PACKAGE}.initialization")
        lacks = _ENTRY - _parameters(getattr(type(model), _OPEN))
        lacks |= {"workload_hints"} - _parameters(initialization.resolve_using_hints)
        if lacks:
            raise AttributeError(f"no parameter {', '.join(sorted(lacks))}")
        return Shape(update=_parameters(cache.update), call=frozenset(call.__annotations__),
                     cache=frozenset(vars(cache)), layer=_layer_parameters(model))
    except (ImportError, AttributeError) as missing:
        raise refusal("must have what wavefill hooks into", f"{installed()}: {missing}") from None


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _layer_parameters(model: PreTrainedModel) -> frozenset[str]:
    """What every attention layer of the model takes: a name that only some take is no part of it."""
    layers = {type(m) for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")}
    return frozenset.intersection(*map(_parameters, (layer.forward for layer in layers))) if layers else frozenset()


# -- names ---------------------------------------------------------------------------------------------------------

def _paged_name(contract: Contract, plain: str) -> str:
    """Register the attention and the mask of `plain` for continuous batching; doing it again changes nothing."""
    name = f"{contract.prefix}{BATCHED}{plain}"
    AttentionInterface.register(name, AttentionInterface()[plain])
    AttentionMaskInterface.register(name, AttentionMaskInterface()[plain])
    return name


# -- the paged forward pass ----------------------------------------------------------------------------------------

@untraced
def _begin(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    set_current(None)
    if MARKS.isdisjoint(kwargs) or previous_of(model.config._attn_implementation) is None:
        return None
    contract = contract_of(model)
    contract.check_pass(kwargs)
    set_current(Pass(contract))
    # Lengths say everything. Without a mask of four dimensions, which it hands on as it is, transformers would look in
    # position_ids for packed sequences, and wait for the device.
    return args, {**kwargs, "attention_mask": torch.empty(1, 1, 0, 0)}


@untraced
def _end(model: PreTrainedModel, args: tuple[Any, ...], output: Any) -> None:
    set_current(None)


# -- the door ------------------------------------------------------------------------------------------------------

def init_continuous_batching(
    self: PreTrainedModel,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """A manager whose batches go through wavefill; the model's own method otherwise.

    Raises `BackendUnavailable` when the installed transformers has no contract that was tested on the model's kind of
    device, and `UnsupportedModel` for one with states in place of K and V, before anything is changed.
    """
    stock = getattr(type(self), _OPEN)
    name = self.config._attn_implementation
    plain = plain_name(name)
    if previous_of(name) is None:  # set to another attention since `enable`
        return stock(self, generation_config=generation_config, workload_hints=workload_hints,
                     continuous_batching_config=continuous_batching_config)
    if isinstance(decoder_of(self), HYBRIDS):
        raise UnsupportedModel(
            f"model: {type(self).__name__} has layers with a state in place of K and V, for which transformers' "
            "continuous batching has no cache. Call generate() with a batch."
        )
    if (schedule := decoder_of(self).__dict__.get(SCHEDULE)) is not None:
        raise invalid("schedule", 'must be "auto" in continuous batching', schedule, "Call enable(model) without it.")
    contract = contract_of(self)
    if self.device.type != "cpu" and not contract.on_gpu:
        raise BackendUnavailable(complaint(
            PARAM, f"must be of transformers {gpu_releases()} on a GPU", f"{installed()} on {self.device}",
            "Install such a release, call generate() with a batch, or disable(model) first."))
    kept = getattr(self, "_cached_continuous_batching_manager", None)
    if kept is not None and kept not in _managers:
        raise invalid(PARAM, "a persistent manager must be made after enable(model)", "one made before",
                      "Call model.destroy_cached_continuous_batching_manager() first.")
    config = continuous_batching_config or getattr(generation_config or self.generation_config,
                                                   "continuous_batching_config", None)
    config = copy.deepcopy(config) if config is not None else transformers.ContinuousBatchingConfig()
    _choose_graphs(self, config)
    blocks = _blocks(self, config, workload_hints)
    config.max_blocks_per_request = 0  # so that transformers doesn't look for FlashAttention's kernel
    self.config._attn_implementation = _paged_name(contract, plain)
    try:
        manager = stock(self, generation_config=generation_config, continuous_batching_config=config,
                        workload_hints=workload_hints)
        if not hasattr(manager, "_original_attn_impl"):
            raise refusal("must have a manager that restores the model's attention", installed())
    except BaseException:
        self.config._attn_implementation = name
        raise
    manager._original_attn_impl = plain  # what `manager.stop` goes back to
    if manager not in _managers:
        manager.continuous_batching_config.max_blocks_per_request = blocks
        _managers.add(manager)
    return manager


def _choose_graphs(model: PreTrainedModel, config: Any) -> None:
    """Set `config` to no CUDA graphs and no batches prepared ahead where they can't be, before transformers chooses.

    On the CPU it would capture nothing, and replay it, if it saw a GPU. A model that waits for the device in its
    forward can't be captured; whoever asks for it all the same gets what transformers makes of it. Batches prepared
    ahead gave wrong tokens on a GPU, in some runs and not in others.
    """
    if model.device.type == "cpu":
        config.use_cuda_graph = config.use_async_batching = False
        return
    if config.use_cuda_graph is None and _waits(model):
        config.use_cuda_graph = False
    if config.use_async_batching:
        raise invalid("use_async_batching", "must be false for an enabled model on a GPU", True,
                      "Leave it out, or call wavefill.integrations.transformers.disable(model).")
    config.use_async_batching = False


def _waits(model: PreTrainedModel) -> bool:
    """Whether a forward reads values on the host: experts, and RoPE whose frequencies follow the longest position."""
    text = model.config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    return bool(kinds & {"dynamic", "longrope"}) or getattr(text, "num_local_experts", None) is not None


def _blocks(model: PreTrainedModel, config: Any, hints: Any) -> int:
    """Blocks of a request in the decode path, 0 for none: a cache with rings (sliding windows) has no block tables."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    windowed = "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None) is not None
    if windowed:
        return 0
    if config.max_blocks_per_request is not None:
        return int(config.max_blocks_per_request)
    resolved = copy.deepcopy(config)
    initialization = importlib.import_module(f"{_PACKAGE}.initialization")
    initialization.resolve_using_hints(resolved, hints)
    if resolved.max_blocks_per_request is not None:
        return int(resolved.max_blocks_per_request)
    page_size = int(config.page_size if hasattr(config, "page_size") else config.block_size)
    positions = ceil(getattr(text, "max_position_embeddings", 0) / page_size) + 1
    return min(max(positions, _FEWEST_BLOCKS), _MOST_BLOCKS)


# -- on and off ----------------------------------------------------------------------------------------------------

def install(model: PreTrainedModel) -> None:
    """Cover the model's door and mark its paged forward passes. Doing it again changes nothing.

    A decoder without a head has no door, and is left alone.
    """
    if _OPEN in vars(model) or not hasattr(type(model), _OPEN):
        return
    with suppress(BackendUnavailable):  # the door says so, if anyone comes to it
        contract_of(model)
    # A partial, since a bound method is pickled as the name of an attribute, which the class has too.
    setattr(model, _OPEN, partial(init_continuous_batching, model))
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)


def uninstall(model: PreTrainedModel) -> None:
    """Leave the model as `install` found it. Raises `InvalidArgument` while a manager of it generates."""
    mine = [manager for manager in _managers if manager.model is model]
    if any(manager.is_running() for manager in mine):
        raise invalid("model", "must not be generating when wavefill is taken off it",
                      "a running continuous-batching manager", "Call its stop() first.")
    # A manager kept for later was sized for pages without masks, which the model's own attention can't work with.
    if getattr(model, "_cached_continuous_batching_manager", None) in mine:
        model.destroy_cached_continuous_batching_manager()
    vars(model).pop(_OPEN, None)
    # Found by their function, since a copy of an enabled model has the hooks but not their handles.
    for hooks, function in ((model._forward_pre_hooks, _begin), (model._forward_hooks, _end)):
        for key in [key for key, hook in hooks.items() if hook is function]:
            del hooks[key]
            model._forward_pre_hooks_with_kwargs.pop(key, None)
            model._forward_hooks_always_called.pop(key, None)
    name = model.config._attn_implementation
    if name is not None and previous_of(name) is not None:
        model.config._attn_implementation = plain_name(name)

