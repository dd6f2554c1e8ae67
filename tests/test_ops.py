"""The operators: schemas that say what is written, fakes that match, graphs that give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck

import wavefill
from helpers import DTYPES, Case, make_case, name_of
from wavefill import BackendUnavailable, Fixed, InvalidArgument, InvalidType, Invariant, StreamK, ops

WAVEFILL = torch.ops.wavefill

CASES: dict[str, Callable[[], Case]] = {
    "paged": lambda: make_case([5, 0, 130, 17], page_size=16),
    "contiguous": lambda: make_case([5, 0, 130, 17], dtype=torch.bfloat16, DV=16),
    "varlen": lambda: make_case([5, 0, 130, 17], page_size=16, q_lens=[3, 1, 7, 0], window=50),
    "not-causal": lambda: make_case([5, 9], q_lens=[3, 1], causal=False, scale=0.3),
    "latent": lambda: make_case([5, 70], page_size=16, latent=True, DV=16, KH=1, dtype=torch.float16),
    "hnd": lambda: make_case([5, 70], page_size=16, layout="hnd"),
    "no-requests": lambda: make_case([], page_size=16),
    "options": lambda: make_case([5, 0, 130, 17], page_size=16, softcap=2.0, sinks=True, alibi_slopes=True),
    "options-of-drafts": lambda: make_case([5, 0, 130, 17], q_lens=[3, 1, 40, 0], softcap=2.0, sinks=True,
                                           alibi_slopes=True, mask=True, dtype=torch.bfloat16),
}


def arguments(case: Case, schedule: str = "auto") -> tuple[Any, ...]:
    """The operator's arguments, in order."""
    return (*case.tensors(), case.cu_seqlens_q, case.scale, case.causal, case.window, case.head_dim_v, schedule,
            None, None, None, *extras(case).values())


def extras(case: Case) -> dict[str, Any]:
    """The options of the scores, in the operator's order."""
    return {"softcap": case.softcap, "sinks": case.sinks, "alibi_slopes": case.alibi_slopes, "mask": case.mask}


@pytest.mark.parametrize("kind", CASES)
def test_opcheck_attention(kind: str) -> None:
    case = CASES[kind]()
    opcheck(WAVEFILL.attention.default, arguments(case))
    opcheck(WAVEFILL.attention_out.default, arguments(case), {"out": torch.empty(case.out_shape, dtype=case.q.dtype)})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_opcheck_append_and_merge(dtype: torch.dtype) -> None:
    def some(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    slots = torch.tensor([3, -1, 20])
    opcheck(WAVEFILL.append.default, (some(4, 16, 2, 8), some(4, 16, 2, 4), some(3, 2, 8), some(3, 2, 4), slots))
    both = some(4, 16, 2, 2, 8)
    opcheck(WAVEFILL.append.default, (both[..., 0, :], both[..., 1, :], some(3, 2, 8), some(3, 2, 8), slots))
    opcheck(WAVEFILL.merge_states.default, (some(3, 4, 5, 8), torch.randn(3, 4, 5)))


@pytest.mark.parametrize("kind", CASES)
def test_fake_results_have_the_real_ones_shape_dtype_and_strides(kind: str) -> None:
    case = CASES[kind]()
    real = ops.attention(*arguments(case))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = ops.attention(*arguments(case))
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)


def test_schemas_declare_what_is_written() -> None:
    written = {
        name: [a.name for a in getattr(WAVEFILL, name).default._schema.arguments if a.alias_info is not None]
        for name in ("attention", "attention_out", "append", "merge_states", "flat_linear")
    }
    assert written == {"attention": [], "attention_out": ["out"], "merge_states": [], "flat_linear": [],
                       "append": ["k_cache", "v_cache", "k_scale", "v_scale"]}


# ---- torch.compile


def _decode(case: Case, out: Tensor | None = None) -> tuple[Tensor, ...]:
    tensors = case.tensors()
    options = {"scale": case.scale, "window": case.window, "head_dim_v": case.head_dim_v, "return_lse": True}
    options |= {name: value for name, value in extras(case).items() if name != "mask"}
    first, lse = wavefill.decode_attention(*tensors, **options)
    second = wavefill.decode_attention(*tensors, **{**options, "return_lse": False}, schedule=Fixed(splits=2), out=out)
    return first * 2, lse + 1, second * 3


def _varlen(case: Case, out: Tensor | None = None) -> tuple[Tensor, ...]:
    options = {"cu_seqlens_q": case.cu_seqlens_q, "causal": case.causal, "scale": case.scale, "window": case.window}
    options |= extras(case)
    first, lse = wavefill.attention(*case.tensors(), **options, return_lse=True, schedule="invariant")
    second, _ = wavefill.attention(*case.tensors(), **options, return_lse=True, schedule=StreamK(tile=32), out=out)
    return first * 2, lse + 1, second * 3


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("with_out", [False, True], ids=["fresh", "out"])
@pytest.mark.parametrize("kind", [kind for kind in CASES if kind not in ("hnd", "no-requests")])
def test_compiled_public_functions_give_the_same_bits(kind: str, with_out: bool, dynamic: bool | None) -> None:
    torch.compiler.reset()
    case = CASES[kind]()
    function = _decode if case.cu_seqlens_q is None else _varlen
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    outs = [torch.full(case.out_shape, torch.nan, dtype=case.q.dtype) if with_out else None for _ in range(2)]
    expected, found = function(case, outs[0]), compiled(case, outs[1])
    for x, y in zip(expected, found, strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()
    if with_out:
        assert torch.equal(*outs)


def test_inductor_compiles_a_decode_step_that_appends() -> None:
    """One step of a model: write the cache, attend to it, merge with a second part."""
    torch.compiler.reset()

    def step(q: Tensor, k: Tensor, v: Tensor, slots: Tensor, pages: wavefill.KVPages, lens: Tensor, table: Tensor,
             out: Tensor) -> tuple[Tensor, Tensor]:
        WAVEFILL.append(pages.k, pages.v, k * 2, v, slots)
        part, lse = wavefill.decode_attention(q, pages, None, lens, table, return_lse=True)
        again = wavefill.decode_attention(q, pages, None, lens, table, out=out)
        merged = wavefill.merge_states(torch.stack([part, again + 1]), torch.stack([lse, lse]))
        return merged[0] + out, merged[1]

    def inputs() -> tuple[Any, ...]:
        torch.manual_seed(1)
        pages = wavefill.KVPages(torch.randn(4, 16, 2, 8), torch.randn(4, 16, 2, 8))
        return (torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8), torch.tensor([2, 16]), pages,
                torch.tensor([3, 1], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32),
                torch.empty(2, 4, 8))

    a, b = inputs(), inputs()
    with torch.no_grad():
        expected, found = step(*a), torch.compile(step, fullgraph=True)(*b)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    assert torch.equal(a[4].k, b[4].k)
    assert torch.equal(a[4].v, b[4].v)
    assert torch.equal(a[-1], b[-1])


def test_a_compiled_call_takes_other_lengths_without_compiling_again() -> None:
    torch.compiler.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(wavefill.decode_attention, fullgraph=True, backend=graphs)
    case = make_case([40, 3], page_size=16)
    for lens in ([40, 3], [12, 0], [1, 3]):
        q, k, v, _, table = case.tensors()
        now = torch.tensor(lens, dtype=torch.int32)
        assert torch.equal(compiled(q, k, v, now, table), wavefill.decode_attention(q, k, v, now, table))
    assert graphs.frame_count == 1


def test_bad_input_is_refused_while_compiling() -> None:
    torch.compiler.reset()
    case = make_case([5, 3])
    with pytest.raises(Exception, match="k_cache: must have the head size of q"):
        torch.compile(wavefill.decode_attention, fullgraph=True)(case.q[..., :16], *case.tensors()[1:])


# ---- direct calls are as safe as the public functions


def test_a_direct_call_is_checked() -> None:
    case = make_case([5, 3], page_size=4)
    q, k, v, lens, table = case.tensors()
    cache, new = torch.zeros(2, 4, 2, 8), torch.zeros(1, 2, 8)
    other, slots = torch.zeros(2, 4, 2, 8), torch.tensor([0])
    for call, error, message in (
        (lambda: WAVEFILL.attention(q, k, v, lens + 99, table), InvalidArgument, "capacity"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table.long()), InvalidType, "block_table: dtype must be int32"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table[:1]), InvalidArgument, "block_table: .*one row"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, None, float("nan")), InvalidArgument, "scale: must be fini"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, window=0), InvalidArgument, "window: must be at least 1"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, schedule="best"), InvalidArgument, "schedule: .*'best'"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, schedule="fixed:splits=x"), InvalidArgument, "schedule: as"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, schedule="fixed:splits=0"), InvalidArgument, "Fixed.splits"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, schedule=f"fixed:splits={2**63}"), InvalidArgument, "Fixed"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, schedule="fixed:chunk=" + "9" * 5000), InvalidArgument,
         "schedule: as text"),
        (lambda: WAVEFILL.attention(q, k, v, lens, table, None, 1e39), InvalidArgument, "scale: must be finite in"),
        (lambda: WAVEFILL.attention_out(q, k, v, lens, table, out=q), InvalidArgument, "out: .*no memory with q"),
        (lambda: WAVEFILL.append(cache, other, new, new, slots + 8), InvalidArgument, r"slots\[0\]: must be below .*8"),
        (lambda: WAVEFILL.append(cache, other, new, new, slots.int()), InvalidType, "slots: must be int64"),
        (lambda: WAVEFILL.append(cache, cache, new, new, slots), InvalidArgument, "k_cache: .*no memory with v_cache"),
        (lambda: WAVEFILL.append(cache[:1].expand(2, -1, -1, -1), other, new, new, slots), InvalidArgument,
         "k_cache: .*not overlap itself"),
        (lambda: WAVEFILL.append(cache, other, cache[0, :1], new, slots), InvalidArgument, "no memory with k"),
        (lambda: WAVEFILL.merge_states(torch.zeros(2, 3, 4), torch.zeros(2, 2)), InvalidArgument, "lses: must have"),
        (lambda: WAVEFILL.merge_states(torch.zeros(2, 3, 4), torch.zeros(2, 3).double()), InvalidType, "lses: dtype"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_other_devices_are_refused_by_name() -> None:
    """No GPU is needed: a fake tensor has the device, and goes the same way."""
    with FakeTensorMode():
        q, kv, new = (torch.empty(shape, device="cuda") for shape in ((1, 4, 8), (4, 16, 2, 8), (1, 2, 8)))
        lens, table = (torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((1,), (1, 1)))
        slots, lses = torch.empty(1, dtype=torch.int64, device="cuda"), torch.empty(1, 4, device="cuda")
        assert wavefill.decode_attention(q, kv, kv, lens, table).shape == q.shape
        assert wavefill.merge_states(q, lses)[1].shape == (4,)
        WAVEFILL.append(kv, kv, new, new, slots)
        with pytest.raises(BackendUnavailable, match=r'device: .*for cpu alone; got cuda.*Move .*\.to\("cpu"\)'):
            wavefill.flat_linear(q, torch.empty(3, 8, device="cuda"))


def test_the_dispatcher_reaches_the_refusal_where_no_kernel_is() -> None:
    with pytest.raises(BackendUnavailable, match="got cuda:3"):
        ops._elsewhere(ops.merge_states, ("cpu",))(torch.empty(1), _OnAGpu())
    for name in ("attention", "attention_out", "append", "merge_states", "flat_linear"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"wavefill::{name}", "CompositeExplicitAutograd")


class _OnAGpu(Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 3)


# ---- torch.func and forward-mode differentiation

Q, KV, LENS = torch.randn(2, 4, 8), torch.randn(2, 6, 2, 8), torch.tensor([6, 3], dtype=torch.int32)


def _decode_of(q: Tensor) -> Tensor:
    return wavefill.decode_attention(q, KV, KV, LENS)


def _packed_of(kv: Tensor) -> Tensor:
    return wavefill.attention(Q, kv, kv, LENS, cu_seqlens_q=torch.tensor([0, 2, 2], dtype=torch.int32))


def _merge_of(lses: Tensor) -> Tensor:
    return wavefill.merge_states(Q, lses)[1]


#: A function of one tensor, the tensor, and the parameter that it arrives in.
DIFFERENTIABLE: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, str]] = {
    "decode": (_decode_of, Q, "q"),
    "attention": (_packed_of, KV, "k_cache"),
    "v": (lambda v: wavefill.decode_attention(Q, KV, v, LENS), KV, "v_cache"),
    "lse": (lambda q: wavefill.decode_attention(q, KV, KV, LENS, return_lse=True)[1], Q, "q"),
    "out": (lambda q: wavefill.decode_attention(q, KV, KV, LENS, out=torch.empty(2, 4, 8)), Q, "q"),
    "merge": (_merge_of, torch.zeros(2, 4), "lses"),
    "sinks": (lambda x: wavefill.decode_attention(Q, KV, KV, LENS, sinks=x), torch.zeros(4), "sinks"),
    "slopes": (lambda x: wavefill.decode_attention(Q, KV, KV, LENS, alibi_slopes=x, sinks=torch.zeros(4)),
               torch.ones(4), "alibi_slopes"),
    "operator": (lambda q: WAVEFILL.attention(q, KV, KV, LENS)[0], Q, "q"),
}
DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
    "dual": lambda f, x: _with_a_tangent(f, x),
}


def _with_a_tangent(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("function", DIFFERENTIABLE)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_no_derivative_is_lost_in_silence(derivative: str, function: str) -> None:
    f, x, parameter = DIFFERENTIABLE[function]
    with pytest.raises(InvalidArgument, match=rf"^{parameter}: wavefill is for inference and has no derivatives; got a "
                                              r"tensor .*\. Give it detached, x\.detach\(\)"):
        DERIVATIVES[derivative](f, x)


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_vmap_says_where_the_dimension_belongs(function: str) -> None:
    f, x, parameter = DIFFERENTIABLE[function]
    step = "Call it once for each value" if parameter in ("sinks", "alibi_slopes") else ".* dimension part of"
    with pytest.raises(InvalidArgument, match=rf"^{parameter}: takes no part in torch\.vmap; got .*wrapped\. {step}"):
        torch.vmap(f)(torch.stack([x, x]))


def _jvp(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.func.jvp(f, (x,), (x,))[1]


def _vmap(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.vmap(f)(torch.stack([x, x]))


@pytest.mark.parametrize("inner", [torch.func.grad, _jvp, _vmap], ids=["grad", "jvp", "vmap"])
@pytest.mark.parametrize("outer", DERIVATIVES)
def test_an_outer_derivative_is_seen_through_an_inner_transform(outer: str, inner: Any) -> None:
    if (outer, inner) == ("dual", _jvp):
        pytest.skip("torch does not nest forward mode in forward mode")
    with pytest.raises(InvalidArgument, match=r"^q: wavefill is for inference and has no derivatives"):
        DERIVATIVES[outer](lambda x: inner(lambda y: (y * _decode_of(x)).sum())(Q), Q)


def test_functionalize_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^q: takes no part in torch\.func\.functionalize"):
        torch.func.functionalize(_decode_of)(Q)


def test_append_takes_no_part_in_transforms() -> None:
    cache, other, slots = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), torch.tensor([0])
    for transform, message in ((torch.vmap, "k: takes no part in torch.vmap"),
                               (lambda f: lambda x: torch.func.jvp(f, (x[0],), (x[0],)), "k: wavefill is for inferen"),
                               (lambda f: lambda x: _with_a_tangent(f, x[0]), "k: wavefill is for inference")):
        with pytest.raises(InvalidArgument, match=message):
            transform(lambda k: WAVEFILL.append(cache, other, k, k, slots))(torch.ones(2, 1, 2, 8))
        assert (cache == 0).all()


@pytest.mark.parametrize("with_out", [False, True], ids=["fresh", "out"])
def test_constants_inside_of_a_transform_are_served(with_out: bool) -> None:
    """What does not depend on the transformed input is an ordinary call; detaching makes it so."""
    expected = _decode_of(Q)

    def call(q: Tensor) -> Tensor:
        return wavefill.decode_attention(q, KV, KV, LENS, out=torch.empty(2, 4, 8) if with_out else None)

    one = torch.ones(2, 4, 8)
    assert torch.equal(torch.func.grad(lambda x: (x * call(Q)).sum())(one), expected)
    assert torch.equal(torch.func.grad(lambda x: (x * call(x.detach())).sum())(Q), expected)
    assert torch.equal(torch.func.grad(lambda x: (x * torch.no_grad()(call)(x)).sum())(Q), expected)
    assert torch.equal(torch.func.jvp(lambda x: x * call(Q), (one,), (one,))[1], expected)
    assert torch.equal(torch.vmap(lambda x: x * call(Q))(torch.ones(3))[2], expected)
    with forward_ad.dual_level():
        product = forward_ad.make_dual(one, one) * call(Q)
        assert torch.equal(forward_ad.unpack_dual(product).tangent, expected)


# ---- tensors that no kernel reads


def _quantized(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint32 if x.dtype == torch.int32 else torch.quint8)


#: How a dense tensor becomes another kind, what the message says it is, and the next step.
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "coo": (lambda x: x.to_sparse(), "layout sparse_coo", "to_dense()"),
    "mkldnn": (lambda x: x.to_mkldnn(), "layout _mkldnn", "to_dense()"),
    "quantized": (_quantized, "a quantized tensor", "dequantize()"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "a nested tensor", "Pack"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "a nested tensor", "Pack"),
}


def _calls() -> dict[str, tuple[Callable[..., Any], dict[str, Tensor]]]:
    table, starts = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    attention = {"q": Q, "k_cache": KV, "v_cache": KV.clone(), "seq_lens": LENS, "block_table": table}
    new = torch.ones(2, 2, 8)
    return {
        "decode_attention": (wavefill.decode_attention, attention | {"out": torch.zeros(2, 4, 8),
                                                                       "sinks": torch.zeros(4)}),
        "attention": (wavefill.attention, attention | {"cu_seqlens_q": starts, "alibi_slopes": torch.ones(4),
                                                       "mask": torch.ones(2, 1, dtype=torch.int32)}),
        "merge_states": (wavefill.merge_states, {"outs": Q, "lses": torch.zeros(2, 4)}),
        "append": (WAVEFILL.append, {"k_cache": KV.clone(), "v_cache": KV.clone(), "k": new, "v": new,
                                     "slots": torch.tensor([0, 1])}),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("function", "parameter"), [(f, p) for f, (_, given) in _calls().items() for p in given])
def test_other_kinds_of_tensors_are_named(function: str, parameter: str, kind: str) -> None:
    call, given = _calls()[function]
    convert, got, next_step = KINDS[kind]
    if kind == "mkldnn" and given[parameter].dtype != torch.float32:
        pytest.skip("mkldnn holds floats alone")
    if kind == "jagged" and given[parameter].dim() == 1:
        pytest.skip("jagged tensors have rows")
    with pytest.raises(InvalidArgument) as caught:
        call(**given | {parameter: convert(given[parameter])})
    assert str(caught.value).startswith(f"{parameter}: must be a dense, strided tensor; got {got}")
    assert next_step in str(caught.value)


def test_a_turned_sign_is_read_or_refused() -> None:
    """`x.conj().imag` is a view whose numbers have the other sign than its memory."""
    q, out = torch._neg_view(-Q), torch.zeros(2, 4, 8)
    assert torch.equal(_decode_of(q), _decode_of(Q))
    for given, name in (({"q": q, "out": out}, "q"), ({"q": Q, "out": torch._neg_view(out)}, "out")):
        with pytest.raises(InvalidArgument, match=rf"^{name}: must be a dense, .*resolve_neg\(\)"):
            wavefill.decode_attention(k_cache=KV, v_cache=KV, seq_lens=LENS, **given)
    assert (out == 0).all()


# ---- schedules as text


@pytest.mark.parametrize("schedule", [
    Fixed(), Fixed(splits=4), Fixed(chunk=512), Fixed(rule="flashdecoding"), StreamK(), StreamK(tile=32), Invariant(),
    Invariant(chunk=2048),
], ids=str)
def test_a_schedule_survives_its_text(schedule: wavefill.spec.Schedule) -> None:
    assert ops.decode_schedule(ops.encode_schedule(schedule)) == schedule
