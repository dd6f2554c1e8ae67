"""Long-context decoding through wavefill for transformers models.

    from wavefill.integrations.transformers import enable, disable
    enable(model)                      # model.generate(...) and model(...) now decode through wavefill
    disable(model)                     # everything as it was
"""

from __future__ import annotations

import re
from typing import TypeVar

try:
    import transformers

    # The oldest release that the tests run; held here, before anything is taken that older ones don't have.
    if tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2])) < (5, 17):
        raise ImportError(f"found {transformers.__version__}")
except ImportError as error:
    raise ImportError(
        f"wavefill.integrations.transformers needs transformers 5.17 or newer: {error}. "
        "Run pip install -U 'wavefill[transformers]'."
    ) from error

from transformers import PreTrainedModel

from wavefill.integrations.transformers import ahead, continuous, fused, graphs, linears
from wavefill.integrations.transformers.attention import register
from wavefill.integrations.transformers.cache import WavefillCache
from wavefill.integrations.transformers.hooks import after, before
from wavefill.integrations.transformers.names import SCHEDULE, name_over, previous_of
from wavefill.integrations.transformers.support import PREVIOUS, check_model, decoder_of
from wavefill.spec import ScheduleArg, UnsupportedModel, invalid, invalid_type, parse_schedule

__all__ = ["WavefillCache", "disable", "enable"]

Model = TypeVar("Model", bound=PreTrainedModel)

# On import and not in `enable`, since a pickled enabled model imports this package where it is loaded, and no more.
register()

#: Attribute of an enabled decoder that holds the handles of its two hooks.
_HANDLES = "_wavefill_handles"


def enable(
    model: Model, kv_format: str = "auto", linear: str = "torch", fuse: bool = False, schedule: ScheduleArg = "auto"
) -> Model:
    """Decode `model` through wavefill, in place, and return it. Enabling twice is the same as once.

    From then on `model.generate(...)`, `model(...)` and `model.generate_batch(...)` keep K and V in a paged cache that
    is written in place, and attend to it through wavefill's kernels. Prompts run at the speed that PyTorch has or, on a
    GPU, the best attention kernel there. On a GPU a step of one token a row is captured as a CUDA graph, and the pages
    of a cache that is no more are kept for the next one until `disable`. Forwards that train, or run without a cache,
    are left as they were. `disable` undoes all of it.

    model:     a decoder on the CPU or one GPU, of any head (`AutoModelForCausalLM`, or the bare `AutoModel`), of the
               families Llama, Qwen2, Qwen3, Mistral, Phi-3, Gemma-2, Gemma-3 (text), gpt-oss, Qwen3-Next, LFM2 or
               Granite 4 (hybrid). In the last three the layers that have states in place of K and V stay as they are.
    kv_format: "auto" keeps K and V in the model's own dtype.
    linear:    "torch" leaves the linear layers alone. "flat" has each plain `torch.nn.Linear` of `model`, a head
               included, compute calls of up to 16 rows (batch x tokens) with wavefill's kernel, which reads the weights
               once: faster where PyTorch's product falls short of the memory bus, with other rounding. Other calls,
               and any that record gradients, run under autocast or are compiled, stay PyTorch's. Enabling again with
               the other word switches back and forth. For models on the CPU.
    fuse:      whether layers of a 16-bit model on a GPU compute calls of up to 64 tokens in fewer launches: Q, K and V
               in one product, gate and up in one, norms with the sum before them, RoPE, SiLU. The weights of such a
               product come to lie side by side, each there once; parameters, state dicts and saved models stay what
               they are. Families Llama, Mistral, Qwen2, Qwen3 and Phi-3; layers with adapters, quantised weights or
               hooks stay as they are. Other rounding. Enable again after `model.to()`, which parts the weights.

    schedule:  of the attention, as for `wavefill.attention`. Under "invariant" its bits for a row don't depend on the
               other rows of the batch, in prompts too; PyTorch's products over more rows may still round otherwise. Not
               for `generate_batch`.

    Raises `UnsupportedModel` for a model that would not be served exactly, before anything is changed.
    """
    if kv_format != "auto":
        raise invalid("kv_format", 'must be "auto"', repr(kv_format), "Quantised formats are not in this version.")
    if not isinstance(linear, str) or linear not in linears.LINEARS:
        raise invalid("linear", 'must be "torch" or "flat"', repr(linear),
                      '"torch" leaves the linear layers alone, "flat" has wavefill compute calls of a few rows.')
    if not isinstance(fuse, bool):
        raise invalid_type("fuse", "must be a bool", repr(fuse), "Pass fuse=True to compute layers in fewer launches.")
    parsed = parse_schedule(schedule)
    decoder = check_model(model)
    if fuse:
        fused.check(model)
    current = model.config._attn_implementation
    # A name of ours may belong to a running continuous-batching manager, and stays.
    if previous_of(current) is None:
        if current not in PREVIOUS:
            raise UnsupportedModel(
                f"model: its attention implementation must be one of {', '.join(PREVIOUS)}; got {current!r}. "
                'Call model.set_attn_implementation("sdpa") first.'
            )
        model.set_attn_implementation(name_over(current))
    if _HANDLES not in decoder.__dict__:
        decoder.__dict__[_HANDLES] = (
            decoder.register_forward_pre_hook(before, with_kwargs=True),
            decoder.register_forward_hook(after, with_kwargs=True, always_call=True),
        )
    decoder.__dict__[SCHEDULE] = None if parsed == "auto" else parsed
    continuous.attach(model)
    linears.choose(model, linear)
    fused.choose(model, fuse)
    graphs.attach(decoder)
    if graphs.graphed(decoder) is not None:
        ahead.attach(model, graphs.begin_next)
    return model


def disable(model: Model) -> Model:
    """Undo `enable` and return the model: its attention, its linear layers, its hooks and its caches are as they were.

    A model that is not enabled is left alone. Caches that were filled while it was enabled can't be continued.
    """
    decoder = decoder_of(model)
    linears.choose(model, "torch")
    fused.choose(model, False)
    if _HANDLES not in decoder.__dict__:
        return model
    continuous.detach(model)
    graphs.detach(decoder)
    ahead.detach(model)
    decoder.__dict__.pop(SCHEDULE, None)
    for handle in decoder.__dict__.pop(_HANDLES):
        handle.remove()
    previous = previous_of(model.config._attn_implementation)
    if previous is not None:
        model.set_attn_implementation(previous)
    return model
