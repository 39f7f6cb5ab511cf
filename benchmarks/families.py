"""Stock models against the same models fused: time of a training step, bytes kept for backward, agreement of losses.

    python benchmarks/families.py [family ...] [--width 256] [--length 128] [--rows 4] [--rounds 9] [--steps 20]

Times are medians of interleaved steps (forward, backward, AdamW) and their ratio the median of the rounds' ratios.
Bytes are those of all storages that autograd is given to keep, parameters aside. Losses are compared over `--steps`
AdamW steps: float64 fused against stock; float32, each against stock's float64.
"""

from __future__ import annotations

import argparse
import copy
import logging
import statistics
import time

import torch

import fusible
from fusible.bench.families import FAMILIES, GATED, Family, Size


def kept(model: torch.nn.Module, family: Family, rows: int, length: int) -> int:
    """Bytes that a forward keeps for its backward."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = family.loss(model, rows, length)
    total = sum(storage.nbytes() for storage in storages.values())
    del loss
    return total


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, family: Family, rows: int, length: int) -> float:
    loss = family.loss(model, rows, length)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def times(models: list[torch.nn.Module], family: Family, args: argparse.Namespace) -> tuple[list[float], float]:
    """Median seconds of a step of each model, and the median ratio of the second to the first."""
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-4, fused=True) for model in models]
    rounds = []
    for number in range(args.rounds + 2):
        pair = []
        for at in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            step(models[at], optimizers[at], family, args.rows, args.length)
            pair.append((at, time.perf_counter() - start))
        rounds.append([seconds for _, seconds in sorted(pair)])
    rounds = rounds[2:]
    medians = [statistics.median(found[at] for found in rounds) for at in (0, 1)]
    return medians, statistics.median(fused / stock for stock, fused in rounds)


def curve(model: torch.nn.Module, family: Family, steps: int) -> torch.Tensor:
    """Losses of some AdamW steps on small batches, one seed each."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for seed in range(steps):
        loss = family.loss(model, 2, 32, seed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def agreement(stock: torch.nn.Module, fused: torch.nn.Module, family: Family, steps: int) -> tuple[float, float, float]:
    """(float64: fused from stock; float32: stock, and fused, from stock's float64), largest differences of losses."""
    truth = curve(copy.deepcopy(stock).double(), family, steps)
    double = curve(copy.deepcopy(fused).double(), family, steps)
    narrow = [curve(copy.deepcopy(model), family, steps) for model in (stock, fused)]
    return ((double - truth).abs().max().item(), *[(losses - truth).abs().max().item() for losses in narrow])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="family")
    for name, default in (("width", 256), ("length", 128), ("rows", 4), ("rounds", 9), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, 2 layers, width {args.width}, "
          f"{args.rows} x {args.length} tokens; losses: {args.steps} steps")  # fmt: skip
    print(f"{'family':22}{'stock ms':>9}{'fused ms':>9}{'ratio':>7}{'stock MiB':>11}{'fused MiB':>11}{'ratio':>7}"
          f"{'f64':>9}{'f32 stock':>11}{'f32 fused':>11}")  # fmt: skip
    for name in args.families:
        gated = name in GATED
        hidden = -(-8 * args.width // 3 // 64) * 64 if gated else 4 * args.width
        family = FAMILIES[name]
        torch.manual_seed(0)
        stock = family.make(Size(args.width, hidden, 2, 8, 1000))
        fused = copy.deepcopy(stock)
        fusible.fuse(fused)
        losses = agreement(stock, fused, family, args.steps)
        sizes = [kept(model, family, args.rows, args.length) for model in (stock, fused)]
        seconds, ratio = times([stock, fused], family, args)
        print(f"{name:22}{seconds[0] * 1e3:9.1f}{seconds[1] * 1e3:9.1f}{ratio:7.2f}{sizes[0] / 2**20:11.1f}"
              f"{sizes[1] / 2**20:11.1f}{sizes[1] / sizes[0]:7.2f}{losses[0]:9.0e}{losses[1]:11.0e}"
              f"{losses[2]:11.0e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
