"""Matrix products, attention and feed-forward blocks beside the vendor's libraries, on the shapes where models use them.

    python benchmarks/matrix_kernels.py --out benchmarks/results/matrix-kernels-h200.json
    python benchmarks/matrix_kernels.py --out lab.json --sets skinny,decode --candidates new=matmul.cu --no-starters

Each workload is one turn of `check_starters.measure_one`: every contender is called in every round, in random order, the
L2 cache flushed before each call; device time by CUDA events, medians over the rounds; and what a contender of ours
returns is held against the float64 oracle before its time counts. `--candidates` adds files of one's own, LABEL=FILE; with
`--checks SECONDS` they are first put through the judge's calls. A line is printed as each workload is done, a short
table last; the file is rewritten each time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from check_starters import STAGES, Timed, measure_one, outcome_of, text_of

from autokernel_hf.records import Backend, DeviceInfo, Record, Scalar, Workload

# Columns and depth of the projections of Llama-1B, Llama-8B and GPT-2 (whose weights are stored the other way round).
LLAMA = (
    (8192, 2048),
    (2048, 8192),
    (3072, 2048),
    (2048, 2048),
    (4096, 4096),
    (6144, 4096),
    (14336, 4096),
    (4096, 14336),
)
GPT2 = ((2304, 768), (3072, 768), (768, 3072))
VOCABULARY = ((128256, 2048), (128256, 4096))
SKINNY = (1, 8, 16, 32, 64)
STARTERS = Path(__file__).parent.parent / "autokernel_hf" / "kernels"
SUFFIX = {"triton": ".py", "cuda": ".cu"}


class Contender(Record):
    """A file under test: its label among the times, its type, and how the judge's calls went, if they were made."""

    label: str
    file: str
    kernel_type: str
    backend: Backend
    build_s: float = 0.0
    registers: int | None = None
    spill_bytes: int | None = None
    calls: int = 0
    done: int = 0
    failures: tuple[str, ...] = ()
    error: str = ""


class Row(Record):
    """A workload's times, and the set that it belongs to."""

    set: str
    timed: Timed


class Report(Record):
    device: DeviceInfo
    contenders: tuple[Contender, ...]
    rows: tuple[Row, ...]
    not_reached: tuple[str, ...]


def workloads() -> Iterator[tuple[str, str, Workload]]:
    """Name of the set, kernel type and workload, the most telling first."""
    from autokernel_hf.kernels import kernel_type

    def product(M: int, N: int, K: int, dtype: str = "float16", **options: Scalar) -> Workload:
        return kernel_type("matmul").build({"M": M, "N": N, "K": K}, dtype, options)

    def attention(dtype: str = "bfloat16", causal: bool = True, **axes: int) -> Workload:
        return kernel_type("flash_attention").build(axes, dtype, {"causal": causal})

    def block(M: int, D: int, H: int, **options: Scalar) -> Workload:
        return kernel_type("fused_mlp").build({"M": M, "D": D, "H": H}, "bfloat16", options)

    for M in SKINNY:
        for N, K in LLAMA:
            yield "skinny", "matmul", product(M, N, K, nt=True)
    for Hq, Hk, D in ((32, 8, 128), (32, 8, 64), (16, 4, 256), (32, 32, 128)):
        for B, Sk in ((1, 4096), (1, 32768), (8, 4096), (32, 2048)):
            yield "decode", "flash_attention", attention(causal=False, B=B, Hq=Hq, Hk=Hk, Sq=1, Sk=Sk, D=D)
    for B, H, S, D in (
        (4, 32, 2048, 128),
        (1, 12, 1024, 64),
        (2, 32, 8192, 128),
        (1, 32, 16384, 128),
        (8, 16, 512, 64),
    ):
        yield "prefill", "flash_attention", attention(B=B, Hq=H, Sq=S, D=D)
    yield "prefill", "flash_attention", attention(B=4, Hq=32, Hk=8, Sq=2048, D=128)
    yield "prefill", "flash_attention", attention(B=8, Hq=12, Sq=512, D=64, causal=False)
    yield "prefill", "flash_attention", attention(B=2, Hq=16, Sq=4096, D=256)
    yield "mlp", "fused_mlp", block(4096, 4096, 11008)
    yield "mlp", "fused_mlp", block(512, 2048, 8192)
    for M in (1, 16, 64):
        yield "mlp-skinny", "fused_mlp", block(M, 2048, 8192)
        yield "mlp-skinny", "fused_mlp", block(M, 4096, 14336)
    for size in (2048, 4096, 8192):
        yield "large", "matmul", product(size, size, size)
        yield "large-nt", "matmul", product(size, size, size, nt=True)
    for M in (16, 512, 4096):
        yield "epilogue", "matmul", product(M, 11008, 4096, nt=True, activation="silu")
        yield "epilogue", "matmul", product(M, 3072, 768, with_bias=True, activation="gelu_new")
        yield "epilogue", "matmul", product(M, 4096, 11008, nt=True, with_residual=True)
    for M in (128, 256, 512, 1024, 4096):
        for N, K in ((8192, 2048), (2048, 8192), (4096, 4096)):
            yield "middle", "matmul", product(M, N, K, nt=True)
    for M in (1, 16):
        for N, K in VOCABULARY:
            yield "vocabulary", "matmul", product(M, N, K, nt=True)
    for M in (1, 16, 64):
        for N, K in GPT2:
            yield "skinny-nn", "matmul", product(M, N, K)
    for M in (16, 64, 512, 4096):
        for N, K in ((8192, 2048), (4096, 4096)):
            yield "float8", "matmul", product(M, N, K, dtype="float8_e4m3fn")


def prepare(file: Path) -> None:
    """Build a file, so that `load` finds it built."""
    from autokernel_hf import build
    from autokernel_hf.candidates import read_candidate
    from autokernel_hf.errors import AutokernelError

    with suppress(AutokernelError):  # which `load` reports
        build.build(read_candidate(file), device="cuda")


def load(
    label: str, file: Path, checks: float, share: tuple[int, int] = (0, 1)
) -> tuple[Contender, Callable[..., Any] | None]:
    """Build a file, and make as many of the judge's calls, or of one share of them, as the seconds allow."""
    from autokernel_hf import build, contract
    from autokernel_hf.candidates import read_candidate
    from autokernel_hf.judge.cases import Scope, cases_of
    from autokernel_hf.kernels import kernel_type

    candidate = read_candidate(file)
    told = Contender(
        label=label, file=file.name, kernel_type=candidate.kernel_type, backend=candidate.backend
    )
    try:
        made = build.build(candidate, device="cuda")
        function: Callable[..., Any] = getattr(build.load(made.path), candidate.kernel_type)
    except Exception as error:  # noqa: BLE001
        return told.model_copy(update={"error": text_of(error)}), None
    told = told.model_copy(
        update={
            "build_s": round(made.seconds, 1),
            "registers": made.resources.registers,
            "spill_bytes": made.resources.spill_bytes,
        }
    )
    if checks <= 0:
        return told, function
    kind = kernel_type(candidate.kernel_type)
    scope = Scope(kernel_type=kind, workloads=(), dtypes=kind.dtypes, backend=candidate.backend)
    cases = [c for stage in STAGES for c in cases_of(stage, scope, contract.check(candidate, kind))]
    random.Random(0).shuffle(cases)
    cases = cases[share[0] :: share[1]]
    failures, done, end = [], 0, time.monotonic() + checks
    for seed, case in enumerate(cases):
        if time.monotonic() > end:
            break
        problem, _ = outcome_of(function, kind, case.workload, case.refuse, "cuda", seed)
        done += 1
        if problem:
            failures.append(
                f"{case.workload.label} {case.workload.dtype} {case.workload.shape}: {problem[:400]}"
            )
            if "CUDA error" in problem:
                break
    told = told.model_copy(update={"calls": len(cases), "done": done, "failures": tuple(failures)})
    return told, None if failures and "CUDA error" in failures[-1] else function


def line(row: Row, ours: Sequence[str]) -> str:
    """One workload: the best peer's time, then each contender's with its ratio to that."""
    us, t = row.timed.us, row.timed
    peers = {n: v for n, v in us.items() if n not in ours}
    best = min(peers, key=lambda n: peers[n]) if peers else ""
    told = " ".join(
        f"{n} {us[n]:.1f}"
        + (f" ({peers[best] / us[n]:.2f}x)" if best else "")
        + (" WRONG" if n in t.wrong else "")
        for n in ours
        if n in us
    )
    lost = " ".join(f"{n}: {text.splitlines()[-1][:200]}" for n, text in t.missing.items() if n in ours)
    wrong = " ".join(f"{n}: {text[:200]}" for n, text in t.wrong.items())
    return f"{row.set:10} {t.label} {t.dtype}: {best} {peers.get(best, 0.0):.1f} us; {told} {lost} {wrong}".rstrip()


def geometric_means(rows: Sequence[Row], ours: Sequence[str]) -> Iterator[str]:
    """A contender's mean ratio to the best peer over each set, where it was right."""
    import math

    for name in dict.fromkeys(r.set for r in rows):
        cells = []
        for contender in ours:
            ratios = []
            for row in rows:
                peers = [v for n, v in row.timed.us.items() if n not in ours]
                if (
                    row.set == name
                    and contender in row.timed.us
                    and contender not in row.timed.wrong
                    and peers
                ):
                    ratios.append(min(peers) / row.timed.us[contender])
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                cells.append(f"{contender} {mean:.3f}x of {len(ratios)}, least {min(ratios):.2f}")
        yield f"{name:10} {'; '.join(cells)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--sets", default="", help="sets of workloads, separated by commas; default all")
    parser.add_argument("--types", default="matmul,flash_attention,fused_mlp", help="kernel types")
    parser.add_argument("--backends", default="triton,cuda", help="whose starters")
    parser.add_argument("--no-starters", action="store_true", help="only peers and --candidates")
    parser.add_argument(
        "--candidates", nargs="*", default=[], metavar="LABEL=FILE", help="files beside the starters"
    )
    parser.add_argument(
        "--checks", type=float, default=0.0, help="seconds of the judge's calls for each file"
    )
    parser.add_argument(
        "--share", default="1/1", help="which of the judge's calls, as 2/4: for processes side by side"
    )
    parser.add_argument("--compile", action="store_true", help="with torch.compile among the peers")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the rounds of a workload")
    parser.add_argument("--budget", type=float, default=225.0, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=8, help="files built at a time")
    options = parser.parse_args()
    end = time.monotonic() + options.budget

    from autokernel_hf.gpu import device_info
    from autokernel_hf.kernels import kernel_type

    types = options.types.split(",")
    sets = set(filter(None, options.sets.split(",")))
    files = [(label, Path(file)) for label, _, file in (c.partition("=") for c in options.candidates)]
    if not options.no_starters:
        files += [(b, STARTERS / b / f"{t}{SUFFIX[b]}") for t in types for b in options.backends.split(",")]
    with ThreadPoolExecutor(
        options.jobs
    ) as pool:  # builds side by side; checks and times one after the other
        list(pool.map(prepare, [file for _, file in files]))
    part, parts = map(int, options.share.split("/"))
    made = [load(label, file, options.checks, (part - 1, parts)) for label, file in files]
    for told, _ in made:
        print(
            f"{told.label} ({told.file}): built in {told.build_s} s, {told.registers} registers, {told.spill_bytes} bytes "
            f"spilled, {told.done - len(told.failures)}/{told.done} right of {told.calls} {told.error}",
            *told.failures[:6],
            sep="\n    ",
            flush=True,
        )
    ours = list(dict.fromkeys(told.label for told, _ in made))
    rows: list[Row] = []
    late: list[str] = []

    device = device_info("cuda")

    def save() -> None:
        Report(
            device=device,
            contenders=tuple(told for told, _ in made),
            rows=tuple(rows),
            not_reached=tuple(late),
        ).save(options.out)

    for name, type_, workload in workloads():
        if type_ not in types or (sets and name not in sets):
            continue
        if time.monotonic() > end:
            late.append(f"{name} {workload.label}")
            continue
        mine = {t.label: f for t, f in made if t.kernel_type == type_ and f is not None}
        timed = measure_one(
            kernel_type(type_),
            workload,
            mine,
            {},
            False,
            min(options.seconds, max(end - time.monotonic(), 1.0)),
            prepare_s=20.0,
        )
        if options.compile:
            again = measure_one(
                kernel_type(type_), workload, mine, {}, True, max(end - time.monotonic(), 1.0)
            )
            timed = again.model_copy(update={"wrong": timed.wrong}) if "compile" in again.us else timed
        rows.append(Row(set=name, timed=timed))
        print(line(rows[-1], ours), flush=True)
        save()
    save()
    print(*geometric_means(rows, ours), sep="\n")
    if late:
        print(f"not reached: {', '.join(late)}")
    good = not any(t.error or t.failures for t, _ in made) and not any(r.timed.wrong for r in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
