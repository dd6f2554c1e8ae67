"""Which calls go to a library of attention kernels, and how it is called; operators of the same schemas stand in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import make_case
from wavefill import StreamK, hardware, prefill
from wavefill.backends.gpu import hopper, launch, libraries, many
from wavefill.backends.gpu.configs import many as many_config
from wavefill.backends.gpu.libraries import Given, Library
from wavefill.spec import BackendUnavailable, InvalidArgument

#: The forward operator of FlashAttention-3's own package and of vLLM's build, and that of another library.
OWN_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)")
VLLM_SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]")
OTHER_SCHEMA = "fwd(Tensor q, Tensor k, Tensor v, Tensor weights) -> Tensor[]"


@pytest.fixture
def define() -> Iterator[Callable[[str, Callable[..., Any]], Any]]:
    """Defines an operator of a schema, and of a space of its own, for one test."""
    made: list[torch.library.Library] = []

    def defined(schema: str, run: Callable[..., Any]) -> Any:
        space = f"wavefill_test_{len(made)}"
        library = torch.library.Library(space, "DEF")  # type: ignore[no-untyped-call]
        made.append(library)
        library.define(schema)
        library.impl("fwd", run, "CPU")
        return getattr(torch.ops, space).fwd.default

    yield defined
    for library in made:
        library._destroy()  # type: ignore[no-untyped-call]


def tensors(T: int = 4096, B: int = 1, S: int = 4096, KH: int = 2, D: int = 128, layout: str = "nhd"
            ) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v that take next to no memory."""
    q = torch.empty(T, 32, D, dtype=torch.bfloat16)
    shape = (B, S, KH, D) if layout == "nhd" else (B, KH, S, D)
    k, v = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    return (q, k, v) if layout == "nhd" else (q, k.transpose(1, 2), v.transpose(1, 2))


def own_call(tensor_cores: bool = True, rows: bool = True) -> Any:
    """What is looked at of a call of our own kernels."""
    attention = object.__new__(many.Launch) if tensor_cores else None
    return SimpleNamespace(expand=object() if rows else None, attention=attention)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch, define: Any) -> None:
    """Both libraries, and no word about them from outside."""
    monkeypatch.delenv("WAVEFILL_PREFILL", raising=False)
    operator = define(VLLM_SCHEMA, lambda *args: [])
    monkeypatch.setattr(libraries, "fa3_operator", lambda: operator)
    monkeypatch.setattr(libraries, "flash_is_torchs", lambda: True)
    monkeypatch.setattr(libraries, "_failed", set())


def chosen(q: Tensor, k: Tensor, v: Tensor, *, hopper: bool = True, **own: bool) -> str:
    found = libraries.choose(own_call(**own), q, k, v, 1.0, True, hopper)
    return "own" if found is None else found.args[0].name  # type: ignore[attr-defined]


@pytest.mark.usefixtures("present")
def test_the_order_is_fa3_then_our_tensor_core_kernel_then_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tensors()
    assert chosen(*prompt) == prefill.FA3
    assert chosen(*prompt, hopper=False, tensor_cores=False) == prefill.FLASH
    monkeypatch.setattr(libraries, "fa3_operator", lambda: None)
    assert chosen(*prompt) == "own"
    assert chosen(*tensors(D=96), tensor_cores=False) == prefill.FLASH
    monkeypatch.setattr(libraries, "flash_is_torchs", lambda: False)
    assert chosen(*prompt, hopper=False, tensor_cores=False) == "own"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert chosen(*prompt) == "own"


@pytest.mark.usefixtures("present")
def test_what_stays_with_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    assert chosen(q[:2048], k[:, :2048], v[:, :2048]) == "own", "too small"
    assert chosen(*tensors(T=4096, S=16400)) == "own", "a chunk over a long prefix"
    assert chosen(*tensors(T=4096, S=16384)) == prefill.FA3
    assert chosen(q, k, v[..., :64]) == "own", "DV is not D"
    assert chosen(*(x[..., :72] for x in (q, k, v))) == "own", "rows of no whole 32 bytes"
    assert chosen(q, torch.empty(1, 4096, 2, 129, dtype=torch.bfloat16)[..., 1:], v) == "own", "unaligned"
    assert chosen(q, k, v[:, :, :1].expand_as(v)) == "own", "a stride of 0"
    assert chosen(q, k, v, rows=False) == "own", "without rows there is no gate"
    monkeypatch.setattr(libraries, "_failed", {(prefill.FA3, 128, torch.bfloat16)})
    assert chosen(q, k, v) == "own", "was refused before"


@pytest.mark.usefixtures("present")
def test_the_variable_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tensors(T=64, S=700)
    for word, name in (("own", "own"), ("fa3", prefill.FA3), ("flash", prefill.FLASH), ("auto", "own")):
        monkeypatch.setenv("WAVEFILL_PREFILL", word)
        assert chosen(*small) == name
    monkeypatch.setenv("WAVEFILL_PREFILL", "fa3")
    with pytest.raises(BackendUnavailable, match=r"WAVEFILL_PREFILL: .*; got 'fa3', and the GPU is not of"):
        chosen(*small, hopper=False, tensor_cores=False)
    monkeypatch.setattr(libraries, "fa3_operator", lambda: None)
    with pytest.raises(BackendUnavailable, match="Install flash_attn_interface"):
        chosen(*small)
    monkeypatch.setenv("WAVEFILL_PREFILL", "flash")
    monkeypatch.setattr(libraries, "_failed", {(prefill.FLASH, 128, torch.bfloat16)})
    assert chosen(*small) == prefill.FLASH, "who names it wants its error"
    monkeypatch.setattr(libraries, "flash_is_torchs", lambda: False)
    with pytest.raises(BackendUnavailable, match="got 'flash', and PyTorch has not its own"):
        chosen(*small)
    monkeypatch.setenv("WAVEFILL_PREFILL", "fastest")
    with pytest.raises(InvalidArgument, match="WAVEFILL_PREFILL: must be one of auto, own, fa3, flash; got 'fastest'"):
        chosen(*small)


@pytest.mark.parametrize("schema", [OWN_SCHEMA, VLLM_SCHEMA], ids=["its package", "vLLM"])
def test_fa3_gets_its_arguments_by_name(schema: str, define: Any) -> None:
    seen: dict[str, Any] = {}
    lse = torch.arange(8.0).view(2, 4)

    def run(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in operator._schema.arguments]
        plain = {argument.name: argument.default_value for argument in operator._schema.arguments}
        seen.update(plain | dict(zip(names, args, strict=False)) | kwargs)
        results = seen["out"], lse, torch.empty(0), torch.empty(0)
        return list(results) if schema == VLLM_SCHEMA else results

    operator = define(schema, run)
    q, k = torch.zeros(4, 2, 16), torch.zeros(1, 9, 2, 16)
    out, given = torch.zeros_like(q), Given(torch.tensor([0, 4]), torch.tensor([7]), torch.tensor([0, 0]), 0.5, True)
    assert torch.equal(libraries._fa3(operator, q, k, k, out, given), lse)
    expected = {"cu_seqlens_q": given.starts, "seqused_k": given.lens, "out": out, "max_seqlen_q": 4,
                "max_seqlen_k": 9, "softmax_scale": 0.5, "is_causal": True, "window_size_left": -1,
                "window_size_right": -1, "softcap": 0.0, "num_splits": 1, "sm_margin": 0, "page_table": None}
    for name, value in expected.items():
        assert torch.equal(seen[name], value) if isinstance(value, Tensor) else seen[name] == value, name


def test_another_operator_is_none_of_fa3s(define: Any) -> None:
    assert libraries._arguments(define(OTHER_SCHEMA, lambda *args: [])) is None
    assert libraries.fa3_operator() is None


@pytest.mark.parametrize(("layout", "B", "apart"), [("nhd", 3, 20), ("hnd", 3, 40), ("hnd", 1, 20)])
def test_one_row_of_keys_holds_each_requests(layout: str, B: int, apart: int) -> None:
    _, k, v = tensors(T=1, B=B, S=20, D=16, layout=layout)
    assert libraries.keys_apart(k, v) == apart
    k.copy_(torch.arange(k.numel()).view(k.shape) % 251)
    row = k.as_strided(((B - 1) * apart + 20, 2, 16), k.stride()[1:])
    for b in range(B):
        assert torch.equal(row[b * apart : b * apart + 20], k[b])


def test_caches_that_are_no_row_of_keys() -> None:
    _, k, v = tensors(T=1, B=3, S=20, D=16)
    assert libraries.keys_apart(k, tensors(T=1, B=3, S=20, D=16, layout="hnd")[2]) is None
    apart = torch.empty(3, 20 * 32 + 16, dtype=torch.bfloat16).as_strided((3, 20, 2, 16), (20 * 32 + 16, 32, 16, 1))
    assert libraries.keys_apart(apart, apart) is None
    assert libraries.keys_apart(k[:, :1].expand(3, 20, 2, 16), v) is None


def test_torchs_flash_is_called_as_its_schema_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU has no such kernel; the schema is held to, and the result taken."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    calls: list[dict[str, Any]] = []

    def flash(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in schema.arguments]
        assert set(kwargs) <= set(names)
        calls.append(dict(zip(names, args, strict=False)) | kwargs)
        return torch.ones_like(args[0]), torch.full((32, 8), 2.0), None, None, None

    monkeypatch.setattr(libraries.torch.ops.aten, "_flash_attention_forward", flash)
    q, k, v = tensors(T=8, B=3, S=20, D=16, layout="hnd")
    starts, lens, keys = torch.tensor([0, 3, 5, 8]), torch.tensor([9, 2, 20]), torch.tensor([0, 40, 80, 120])
    out = torch.zeros_like(q)
    assert torch.equal(libraries._flash(q, k, v, out, Given(starts, lens, keys, 0.25, True)), torch.full((32, 8), 2.0))
    assert bool((out == 1).all())
    call, = calls
    assert call["cum_seq_q"] is starts
    assert call["cum_seq_k"] is keys
    assert call["seqused_k"] is lens
    plain = call["max_q"], call["max_k"], call["dropout_p"], call["is_causal"], call["scale"]
    assert plain == (8, 20, 0.0, True, 0.25)
    assert call["key"].shape == (100, 2, 16)


def refuses(*args: Any) -> Tensor:
    raise RuntimeError("This build does not support head size 16")


@pytest.mark.parametrize("named", [False, True])
def test_a_library_that_refuses_is_not_asked_again(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_failed", set())
    monkeypatch.setattr(libraries, "_launch", lambda *args: None)
    served: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: served.append(kwargs))
    q, k, v = tensors(T=8, S=20, D=16)
    library, lens = Library("a stand-in", refuses), torch.tensor([20], dtype=torch.int32)
    call = own_call(), q, k, v, lens, None, q, torch.empty(q.shape[:2])
    if named:
        with pytest.raises(BackendUnavailable, match=r"WAVEFILL_PREFILL: names .*; got a stand-in, .*head size 16"):
            libraries.attend(library, 1.0, True, named, *call, starts=lens)
        assert not served
        return
    with pytest.warns(RuntimeWarning, match="a stand-in does not take prompts of head size 16 here"):
        libraries.attend(library, 1.0, True, named, *call, starts=lens)
    assert len(served) == 1
    assert libraries._failed == {("a stand-in", 16, torch.bfloat16)}


# ----------------------------------------------------------------------------------------------------- explaining


def kernel(lens: list[int], device: str = "h200", **change: Any) -> str:
    shape = {"HQ": 32, "KH": 8, "D": 128, "page_size": None, "q_lens": lens, "device": device}
    return wavefill.explain(lens, **shape | change).kernel  # type: ignore[arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    monkeypatch.delenv("WAVEFILL_PREFILL", raising=False)
    return lambda where: monkeypatch.setattr(prefill, "fa3_installed", lambda: where)


def test_explain_names_what_computes_a_prompt(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(None)
    assert kernel([8192]) == prefill.MANY
    assert kernel([8192], D=96) == kernel([8192], "a100") == kernel([8192], "b200") == prefill.FLASH
    installed("flash_attn_interface")
    assert kernel([8192]) == kernel([8192], D=96) == "FlashAttention-3 (flash_attn_interface)"
    assert kernel([8192], "b200") == prefill.FLASH
    assert kernel([8192], "MI300X") == prefill.PORTABLE
    assert kernel([8192], "cpu") == prefill.CPP
    for change in ({"page_size": 16}, {"schedule": "stream_k"}, {"schedule": "invariant"}, {"window": 100},
                   {"q_lens": [16]}):
        assert kernel([8192], **change) == prefill.MANY
    assert kernel([700]) == prefill.MANY
    monkeypatch.setenv("WAVEFILL_PREFILL", "fa3")
    assert kernel([700]) == "FlashAttention-3 (flash_attn_interface)"
    assert kernel([700], "b200").startswith("none: WAVEFILL_PREFILL is fa3")
    monkeypatch.setenv("WAVEFILL_PREFILL", "own")
    assert kernel([8192]) == prefill.MANY
    monkeypatch.setenv("WAVEFILL_PREFILL", "flash")
    assert kernel([700]) == prefill.FLASH


def test_explain_names_our_own_kernels(installed: Any) -> None:
    installed("flash_attn_interface")
    assert kernel([8192], q_lens=None) == kernel([8192], q_lens=None, page_size=1) == prefill.DECODE
    assert kernel([8192], q_lens=None, D=80) == prefill.DECODE
    assert kernel([8192], q_lens=None, D=72) == kernel([8192], q_lens=None, dtype="float32") == prefill.PORTABLE
    assert kernel([8192], q_lens=None, device="a100") == prefill.PORTABLE
    assert kernel([8192], page_size=24) == kernel([8192], page_size=16, D=96) == prefill.PORTABLE
    assert kernel([8192], schedule=StreamK(tile=32)) == prefill.PORTABLE
    assert kernel([8192], D=288) == "none: D is 288, and the GPU backend takes up to 256"


def test_the_rules_of_both_sides_are_the_same() -> None:
    assert prefill.MANY_HEAD_SIZES == many.HEAD_SIZES
    assert prefill.BOX == hopper.SIXTEEN
    assert many_config(4, None).tile == prefill.MANY_TILE
    assert {gpu.name for gpu in hardware.GPUS if gpu.capability is None} == {"MI250X", "MI300X"}


def test_tensors_on_the_cpu_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVEFILL_PREFILL", "fa3")
    case = make_case([30, 9], q_lens=[30, 9], D=16, dtype=torch.float16)
    out, lse = wavefill.attention(*case.tensors(), cu_seqlens_q=case.cu_seqlens_q, return_lse=True)
    case.expected.check(out, lse)
    assert math.isfinite(float(lse.sum()))
