"""Which calls go straight to a GPU's kernels; on the CPU, with a launch that only notes that it was called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from wavefill import direct

CALL = object()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(direct.gpu, "run", lambda *arguments: found.append(arguments))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the number of the CPU
    monkeypatch.setattr(direct, "_known", {})
    return found


def tensors(B: int = 2) -> dict[str, Tensor | None]:
    buffer = torch.zeros(3, 9, 4, 16, 64, dtype=torch.bfloat16)
    return {"q": torch.zeros(B, 8, 64, dtype=torch.bfloat16), "k": buffer[0].transpose(1, 2),
            "v": buffer[1].transpose(1, 2), "lens": torch.ones(B, dtype=torch.int32),
            "table": torch.zeros(B, 4, dtype=torch.int32), "out": None}


OPTIONS: dict[str, Any] = {"scale": None, "window": None, "schedule": "auto", "sm_budget": None}


def attend(given: dict[str, Tensor | None], **options: Any) -> Any:
    return direct.attend(**given, **{**OPTIONS, "with_lse": True, **options})  # type: ignore[arg-type]


def passed(**changes: Any) -> dict[str, Tensor | None]:
    given = {**tensors(), **changes}
    direct.remember(**given, **OPTIONS, call=CALL)  # type: ignore[arg-type]
    return given


def test_a_call_like_one_that_passed(launched: list[tuple[Any, ...]]) -> None:
    passed()
    given = tensors()
    out, lse = attend(given)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 8, 64), torch.bfloat16, (2, 8), torch.float32)
    (call, *rest), = launched
    assert call is CALL
    assert all(a is b for a, b in zip(rest[:5], list(given.values())[:5], strict=True))


@pytest.mark.parametrize(("name", "make"), [
    ("q", lambda t: t.float()), ("q", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
    ("q", lambda t: t[:1]), ("k", lambda t: t.contiguous()), ("k", lambda t: t.half()),
    ("v", lambda t: t[..., :32]), ("lens", lambda t: t.long()),
    ("lens", lambda t: torch.ones(4, dtype=torch.int32)[::2]), ("table", lambda t: None), ("table", lambda t: t[:, :3]),
    ("out", lambda t: torch.zeros(2, 8, 64, dtype=torch.bfloat16)),
])
def test_anything_else_takes_the_operator(name: str, make: Any, launched: list[tuple[Any, ...]]) -> None:
    given = passed()
    given[name] = make(given[name])
    assert attend(given) is None
    assert not launched


@pytest.mark.parametrize("options", [{"scale": 1.0}, {"window": 3}, {"schedule": "fixed"}, {"sm_budget": 4}], ids=str)
def test_other_options_take_the_operator(options: dict[str, Any], launched: list[tuple[Any, ...]]) -> None:
    assert attend(passed(), **options) is None


def test_gradients_tangents_transforms_and_modes_take_the_operator(launched: list[tuple[Any, ...]]) -> None:
    given = passed()
    wants = {**given, "q": given["q"].clone().requires_grad_()}
    assert attend(wants) is None
    with torch.no_grad():
        assert attend(wants) is not None
    with torch.autograd.forward_ad.dual_level():
        assert attend(given) is None
    torch.func.vmap(lambda x: x if attend(given) is None else 1 / 0)(torch.ones(2))
    with torch.device("cpu"):
        assert attend(given) is None
    assert len(launched) == 1


def test_a_negative_view_and_a_sparse_tensor_take_the_operator(launched: list[tuple[Any, ...]]) -> None:
    given = passed()
    assert attend({**given, "q": torch._neg_view(given["q"])}) is None
    assert attend({**given, "q": given["q"].to_sparse()}) is None


def test_alignment_and_the_device_are_looked_at_every_time(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = passed()
    q = torch.zeros(2 * 8 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 8, 64)
    assert attend({**given, "q": q}) is None
    monkeypatch.setenv("WAVEFILL_CHECK", "1")
    assert attend(given) is None
    monkeypatch.delenv("WAVEFILL_CHECK")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert attend(given) is None


def test_the_slower_plan_of_unaligned_caches_is_not_remembered(launched: list[tuple[Any, ...]]) -> None:
    aside = torch.zeros(9 * 4 * 16 * 64 + 1, dtype=torch.bfloat16)[1:].view(9, 4, 16, 64).transpose(1, 2)
    given = passed(v=aside)
    assert attend({**given, "v": tensors()["v"]}) is None
    assert not launched


def test_an_output_that_shares_memory_takes_the_operator(launched: list[tuple[Any, ...]]) -> None:
    out = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    given = passed(out=out)
    version = out._version
    assert attend(given)[0] is out
    assert out._version == version + 1
    for name in ("q", "k", "v"):
        shared = given[name].as_strided((2, 8, 64), (512, 64, 1))
        assert attend({**given, "out": shared}) is None
    beside = torch.zeros(2 * 2 * 512, dtype=torch.bfloat16)
    assert attend({**given, "q": beside[:1024].view(2, 8, 64), "out": beside[1024:].view(2, 8, 64)}) is not None
    assert len(launched) == 2


def test_not_more_than_so_many_are_remembered(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST", 3)
    for B in range(1, 9):
        direct.remember(**tensors(B), **OPTIONS, call=CALL)  # type: ignore[arg-type]
    assert len(direct._known) <= 3
    assert attend(tensors(8)) is not None
