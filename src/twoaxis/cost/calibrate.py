"""This machine's rates, measured in well under a minute: what `twoaxis advise --measure` stores.

| figure | how |
|---|---|
| `copy_curve` | `x.clone()` of arrays from 64 KiB to 256 MiB; bytes read and written |
| `gemm_curve`, `matrix_tflops` | float32 products of the shapes of small and middle models; bfloat16 at one shape |
| `launch_us` | forward and backward of a model too small to take time otherwise, over the kernels it launches |
| `cold_gb_per_s` | products of pairs of small arrays, in turn through many that no cache holds |
| `batched_tflops` | a 4 x 4 matrix for each token times its four rows of 128 |
| `native_tflops` | what 12 sources more take the kernel of `depth_read`, where there is one |
| `softmax_gb_per_s` | a softmax over rows of 512 |

On a CPU seconds are those of the process (other jobs do not count) and one thread runs; on a GPU they are those of
the wall, after the device has caught up. Each figure is the best of several turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from twoaxis.cost.hardware import Curve, Hardware
from twoaxis.cost.total import cost
from twoaxis.errors import InputError
from twoaxis.model import Decoder, ModelConfig, write_atomically
from twoaxis.ops import choice, depth_read

COPIES = tuple(1 << power for power in range(16, 29, 2))  # bytes of the array
PRODUCTS = (
    (256, 128, 128),
    (512, 256, 256),
    (512, 256, 1024),
    (1024, 512, 512),
    (1024, 512, 2048),
    (2048, 1024, 1024),
)
COLD = 1 << 17  # bytes of an array in turn
POOL = 256  # of them
SECONDS = 0.06  # of one turn at least
TURNS = 5


def calibrate(device: str = "cpu") -> Hardware:
    """The machine as measured on a device, with one thread on a CPU."""
    if device not in ("cpu", "cuda", "mps"):
        raise InputError(f"device {device!r}: allowed is cpu, cuda, mps")
    if device != "cpu" and not getattr(torch, device).is_available():
        raise InputError(f"torch finds no {device} device here; measure the cpu")
    with _one_thread(device):
        copies = _copies(device)
        products = _products(device)
        half = 1e-12 * _flops(256, 256, 256) / best(_product(256, 256, 256, device, torch.bfloat16), device)
        rows = torch.randn(512, 512, device=device)
        soft = best(lambda: torch.softmax(rows, dim=-1), device)
        cold = best(_turns(device), device)
        small, wide = torch.randn(512, 4, 4, device=device), torch.randn(512, 4, 128, device=device)
        batched = best(lambda: small @ wide, device)
        launch, native = _launch(device), _native(device)
    return Hardware(
        name=f"measured-{device}",
        title=f"this machine's {device}, as measured",
        asynchronous=device != "cpu",
        matrix_tflops={"float32": max(rate for _, rate in products), "bfloat16": half},
        memory_gb_per_s=copies[-1][1],
        memory_gb=_memory(device),
        launch_us=1e6 * launch,
        gemm_curve=products,
        copy_curve=copies,
        softmax_gb_per_s=1e-9 * 2 * rows.nbytes / soft,
        batched_tflops=1e-12 * 2 * 4 * wide.numel() / batched,
        native_tflops=native,
        cold_gb_per_s=1e-9 * 3 * COLD / cold,
        sources={"all": f"measured by twoaxis advise --measure with torch {torch.__version__}"},
    )


def store(machine: Hardware, path: Path) -> None:
    """Write a machine as plain JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(machine.to_dict(), indent=1) + "\n").encode())


def best(run: Callable[[], object], device: str) -> float:
    """Seconds of one run, the best of some turns of many runs."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    run()
    count, least = 1, float("inf")
    for _ in range(TURNS):
        _catch_up(device)
        start = clock()
        for _ in range(count):
            run()
        _catch_up(device)
        seconds = clock() - start
        least = min(least, seconds / count)
        count = max(1, min(10_000, round(SECONDS / max(least, 1e-7))))
    return least


def _copies(device: str) -> Curve:
    """(bytes read and written, GB a second) of a copy into new memory."""
    curve = []
    for size in COPIES:
        x = torch.zeros(size // 4, device=device)
        curve.append((2.0 * size, 2e-9 * size / best(x.clone, device)))
    return tuple(curve)


def _products(device: str) -> Curve:
    """(FLOPs, 1e12 FLOPs a second) of float32 products, by size."""
    curve = [
        (_flops(*shape), 1e-12 * _flops(*shape) / best(_product(*shape, device, torch.float32), device))
        for shape in PRODUCTS
    ]
    return tuple(sorted(curve))


def _turns(device: str) -> Callable[[], object]:
    """Products of arrays that were last used long ago, into new ones that take their place."""
    pool = [torch.ones(COLD // 4, device=device) for _ in range(POOL)]
    at = [0]

    def run() -> None:
        at[0] = i = (at[0] + 3) % POOL
        pool[(i + POOL // 2) % POOL] = pool[i] * pool[(i + 1) % POOL]

    return run


def _product(m: int, k: int, n: int, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    x, w = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    return lambda: torch.nn.functional.linear(x, w)


def _flops(m: int, k: int, n: int) -> float:
    return 2.0 * m * k * n


def _launch(device: str) -> float:
    """Seconds of one kernel with all that Python and autograd do around it."""
    cfg = ModelConfig(vocab_size=8, d_model=8, n_blocks=2, n_heads=1)
    with torch.random.fork_rng(devices=()):
        model = Decoder(cfg).to(device)
    tokens = torch.zeros(1, 3, dtype=torch.int64, device=device)
    total = cost(cfg, 1, 2)
    launches = (total.launches_forward or 0) + (total.launches_backward or 0)
    return best(lambda: model.loss(tokens[:, :-1], tokens[:, 1:]).backward(), device) / launches


def _native(device: str) -> float | None:
    """1e12 FLOPs a second of the read kernel without its call; None where it is not used."""
    if device != "cpu" or choice.requested() in ("plain", "compiled") or choice.library("depth_read") is None:
        return None
    query, source = torch.ones(128), torch.randn(512, 128)
    with torch.enable_grad():  # steps without gradients run another way
        few, many = (best(partial(depth_read, query, (source,) * n), device) for n in (4, 16))
    return 1e-12 * 6 * 12 * source.numel() / max(many - few, 1e-9)


def _memory(device: str) -> float | None:
    if device == "cuda":
        return 1e-9 * torch.cuda.get_device_properties(0).total_memory
    try:
        import os

        return 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _catch_up(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
