"""Train a small character-level transformer on the device and on the CPU, and compare.

The text comes from Python's own standard library. Both runs start from the same weights and see the same batches; their
steps alternate, so a busy machine slows both. `make demo` runs this.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import openreg_ops

FILES = ["argparse", "ast", "dataclasses", "enum", "functools", "inspect", "pathlib", "textwrap", "typing", "zipfile"]
CONTEXT, BATCH = 128, 16
# Training amplifies rounding; a warm-up and clipped gradients keep it near one unit in the last place of the loss.
RATE, WARMUP, CLIP = 2e-3, 20, 1.0
WARMUP_OF_GRAPH = 3  # eager steps before the capture, which create the optimizer's state
# The largest |loss on the device - loss on the CPU| that counts as rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12, torch.bfloat16: 5e-2}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return openreg_ops.rms_norm(x, self.weight, 1e-6)[0]


class Block(nn.Module):
    """Causal attention, then a gated MLP; each normalizes its input and adds its result to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(openreg_ops.swiglu(gate, up))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int = 128, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[-1]]
        return self.head(self.norm(self.blocks(x)))


class Run:
    """One training run: a model and its optimizer on a device, and the results of each step."""

    def __init__(
        self, vocabulary: int, device: str, dtype: torch.dtype, compiled: bool = False, captured: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = Transformer(vocabulary).to(self.device, dtype)
        self.forward = torch.compile(self.model, fullgraph=True) if compiled else self.model
        # A graph reads the learning rate and the step at each replay, so they are tensors of the device.
        rate = torch.tensor(RATE, device=self.device) if captured else RATE
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, eps=1e-6, capturable=captured)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
        self.captured, self.graph = captured, None
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def train(self, tokens: Tensor) -> Tensor:
        """Forward, backward and the optimizer; returns the loss."""
        logits = self.forward(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss

    def replay(self, tokens: Tensor) -> Tensor:
        """`train` as a graph: the first steps warm up, the next one is captured, and all later ones are replays."""
        if not self.losses:
            self.tokens = torch.empty_like(tokens)
        self.tokens.copy_(tokens)
        if len(self.losses) < WARMUP_OF_GRAPH:
            stream = torch.openreg.Stream()
            stream.wait_stream(torch.openreg.current_stream())
            with stream:
                loss = self.train(self.tokens)
            torch.openreg.current_stream().wait_stream(stream)
            return loss
        if self.graph is None:
            self.graph = torch.openreg.Graph()
            with torch.openreg.graph(self.graph):
                self.loss = self.train(self.tokens)
        self.graph.replay()
        return self.loss

    def step(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        tokens = tokens.to(self.device)
        loss = self.replay(tokens) if self.captured else self.train(tokens)
        self.schedule.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def sample(self, start: Tensor, count: int) -> list[int]:
        """Characters sampled from the model; on the device, with the device's own random generator."""
        tokens = start.to(self.device)
        for _ in range(count):
            probabilities = (self.model(tokens[None, -CONTEXT:])[0, -1].float() / 0.7).softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)])
        return tokens.tolist()


def read_text() -> str:
    """Some of the standard library's sources, in ASCII."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library / f"{name}.py" for name in FILES]
    text = "".join(path.read_text(encoding="utf-8") for path in paths if path.exists())
    return "".join(character if character.isascii() else "?" for character in text)


def progress(done: int, total: int, text: str) -> None:
    """A progress bar on one line of a terminal; elsewhere, an occasional line."""
    bar = "#" * (30 * done // total)
    if sys.stdout.isatty():
        print(f"\r[{bar:.<30}] {done}/{total}  {text}", end="\n" if done == total else "", flush=True)
    elif done == 1 or done % max(total // 10, 1) == 0:
        print(f"{done:5}/{total}  {text}", flush=True)


def draw(values: list[float], width: int = 64, height: int = 12) -> str:
    """A curve in braille: every character holds 2 by 4 points."""
    low, high = min(values), max(values)
    cells = [[0] * width for _ in range(height)]
    dots = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
    previous = None
    for x in range(2 * width):
        value = values[x * (len(values) - 1) // (2 * width - 1)]
        y = round((high - value) / ((high - low) or 1) * (4 * height - 1))
        for point in range(min(y, previous if previous is not None else y), max(y, previous or y) + 1):
            cells[point // 4][x // 2] |= dots[x % 2][point % 4]
        previous = y
    lines = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    labels = [f"{high:6.3f} ", *[" " * 7] * (height - 2), f"{low:6.3f} "]
    axis = f"{'':7}└{'─' * width}\n{'':8}1{f'step {len(values)}':>{width - 1}}"
    return "\n".join(f"{label}│{line}" for label, line in zip(labels, lines, strict=True)) + "\n" + axis


def save_picture(path: Path, run: Run, cpu: Run) -> str:
    """Plot the loss curves and, below them, their difference; returns a message about the plot."""
    try:
        import matplotlib
    except ImportError:
        return "no PNG: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(run.losses) + 1)
    figure, (curve, difference) = pyplot.subplots(2, 1, sharex=True, height_ratios=[3, 1], figsize=(8, 6))
    curve.plot(steps, run.losses, linewidth=4, alpha=0.4, label=str(run.device))
    curve.plot(steps, cpu.losses, linewidth=1, color="black", label="cpu")
    curve.set(ylabel="cross entropy", title="A character-level transformer on the standard library's sources")
    curve.legend()
    difference.plot(steps, [abs(a - b) for a, b in zip(run.losses, cpu.losses, strict=True)])
    difference.set(xlabel="step", ylabel="|difference|")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"loss curves: {path}"


def main(argv: list[str] | None = None) -> int:
    """Train, compare and report; returns 1 if an operator fell back or the losses differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", default="openreg:0", help="the device to compare with the CPU (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the model on the device with torch.compile, but not the model on the CPU",
    )
    parser.add_argument(
        "--graph", action="store_true", help="capture a training step on the device once, then replay it"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the PNG (default %(default)s)")
    options = parser.parse_args(argv)
    dtype = getattr(torch, options.dtype)

    text = read_text()
    characters = sorted(set(text))
    codes = {character: code for code, character in enumerate(characters)}
    tokens = torch.tensor([codes[character] for character in text])
    run = Run(len(characters), options.device, dtype, options.compile, options.graph)
    cpu = Run(len(characters), "cpu", dtype)
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"{parameters:,} parameters, {len(text):,} characters, {options.dtype}, "
          f"{run.device}{', compiled' * options.compile}{', a graph' * options.graph} beside cpu "
          f"({torch.get_num_threads()} threads)")  # fmt: skip

    openreg_ops.fallback.reset()
    generator = torch.Generator().manual_seed(0)
    native = 0
    for step in range(options.steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)
        batch = tokens[starts + torch.arange(CONTEXT + 1)]
        before = openreg_ops._C.launch_count()
        for one in (run, cpu) if step % 2 else (cpu, run):
            one.step(batch)
        native += openreg_ops._C.launch_count() - before
        progress(step + 1, options.steps, f"loss {run.losses[-1]:.4f}  cpu {cpu.losses[-1]:.4f}")

    print(f"\nloss on {run.device}")
    print(draw(run.losses))
    print(save_picture(options.out / "train_char_transformer.png", run, cpu))
    prompt = torch.tensor([codes[character] for character in "    def "])
    print(f"\n{run.device} writes:\n{''.join(characters[code] for code in run.sample(prompt, 160))}\n")

    fallbacks = openreg_ops.fallback.report()
    for record in fallbacks:
        print(f"fell back: {record.operator}, {record.calls} calls")
    fallen = sum(record.calls for record in fallbacks)
    difference = max(abs(a - b) for a, b in zip(run.losses, cpu.losses, strict=True))
    equal = difference <= TOLERANCE[dtype] and math.isfinite(difference)
    warm = 5 if options.steps > 10 else 0  # the first steps fill pools and start threads
    times = [statistics.median(one.seconds[warm:]) for one in (run, cpu)]
    print(f"{native:,} operators ran natively, {fallen:,} fell back; "
          f"largest loss difference {difference:.1e} ({'within' if equal else 'NOT within'} rounding); "
          f"a step takes {times[0] * 1e3:.1f} ms, {times[0] / times[1]:.2f} times the CPU's")  # fmt: skip
    return 0 if equal and not fallen else 1


if __name__ == "__main__":
    sys.exit(main())
