"""What each number format costs in accuracy and brings in speed, against float32 in the same process.

    python -m benchmarks.number_formats --positions 2500 --runs 5

Accuracy: the bundled model reads English prose (this project's documentation) in pieces of 500 tokens;
at each position its distribution over the next token is compared with float32's. KL is in nats. "gap" and
"answer" are about the README's question: how far the logit of the right first token ("The") lies above that
of the wrong one ("L"), and whether the greedy answer is right.

Speed: medians over runs in which the formats take turns, one thread: a prompt of 512 tokens, and a step of 1
and of 16 decoding sequences with a context of 300 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.batch import Batch, ScheduledSequence
from engine.kv_cache_storage import KvCacheStorage
from engine.model_runner import ModelRunner, kv_layout
from engine.models.load import load_model
from engine.ops.cpu import CpuBackend
from engine.ops.number_formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NumberFormat,
    has_float16_linear,
    resolve_kv_cache_dtype,
)
from model_files.gguf import GgufFile
from model_files.model_source import BUNDLED_MODEL, resolve_model
from text_pipeline.text_model import TextModel, load_text_model

BLOCK_SIZE = 16
PIECE = 500  # tokens
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
DOCUMENTS = Path(__file__).parents[1] / "docs"
PROMPT, CONTEXT, BATCHES = 512, 300, (1, 16)
TIMED = [7 * position % 40_000 for position in range(PROMPT)]


@dataclass
class Measured:
    """One format's figures."""

    kernels: str
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gap: float = 0.0
    answer: str = ""
    prompt_ms: list[float] = field(default_factory=list)
    step_ms: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in BATCHES})


class Reader:
    """The model in one format, with a KV cache of its own."""

    def __init__(self, number_format: NumberFormat) -> None:
        self.backend = CpuBackend(number_format)
        model = load_model(resolve_model(BUNDLED_MODEL), backend=self.backend)
        self.eos_token_ids = model.config.eos_token_ids
        dtype = resolve_kv_cache_dtype("auto", number_format)
        layout = kv_layout(model.config, BLOCK_SIZE, dtype)
        self._num_blocks = -(-PROMPT // BLOCK_SIZE)
        self._runner = ModelRunner(model, KvCacheStorage(layout, max(BATCHES) * self._num_blocks + 1))

    def step(self, parts: Sequence[tuple[int, Sequence[int], int]]) -> torch.Tensor:
        """Logits after the last token of each part: (sequence's number, tokens, position of the first)."""
        scheduled = [
            ScheduledSequence(
                request_id=str(number),
                token_ids=tokens,
                start=start,
                block_ids=range(1 + number * self._num_blocks, 1 + (number + 1) * self._num_blocks),
                num_logits=1,
            )
            for number, tokens, start in parts
        ]
        return self._runner.forward(Batch(tuple(scheduled)))

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities after each position, ``[num_tokens, vocab_size]``.

        All positions in one step: a layer writes every key and value before it attends.
        """
        return self.step([(0, [token], position) for position, token in enumerate(tokens)]).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--positions", type=int, default=2500)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = text_model()
    formats = [FLOAT32, *([FLOAT16] if has_float16_linear() else []), BFLOAT16]
    readers = {number_format.name: Reader(number_format) for number_format in formats}
    measured = {name: Measured(reader.backend.kernels) for name, reader in readers.items()}
    compare(readers, measured, ordinary_text(text, options.positions))
    for name, reader in readers.items():
        ask(reader, text, measured[name])
        fill_contexts(reader)
    for _ in range(options.runs):
        for name, reader in readers.items():
            time_steps(reader, measured[name])
    report(measured)


def text_model() -> TextModel:
    source = resolve_model(BUNDLED_MODEL)
    with GgufFile.open(source.path) as file:
        return load_text_model("gguf", source.path, file.metadata)


def ordinary_text(text: TextModel, num_tokens: int) -> list[int]:
    prose = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    return text.tokenizer.encode(prose, parse_special=False)[:num_tokens]


def compare(readers: dict[str, Reader], measured: dict[str, Measured], tokens: list[int]) -> None:
    """Accuracy: each piece in each format against float32's."""
    for start in range(0, len(tokens), PIECE):
        piece = tokens[start : start + PIECE]
        following = torch.tensor(piece[1:])
        exact = readers["float32"].read(piece)
        for name, reader in readers.items():
            ours = exact if name == "float32" else reader.read(piece)
            figures = measured[name]
            figures.kl += (exact.exp() * (exact - ours)).sum(dim=-1).tolist()
            figures.same_top += (exact.argmax(dim=-1) == ours.argmax(dim=-1)).tolist()
            figures.loss += (-ours[:-1].gather(1, following[:, None])).flatten().tolist()


def ask(reader: Reader, text: TextModel, figures: Measured) -> None:
    """The README's question, greedily."""
    prompt = text.render_chat(QUESTION).encode()
    (the,), (wrong,) = (text.tokenizer.encode(word, parse_special=False) for word in ("The", "L"))
    logits = reader.step([(0, prompt, 0)])[0]
    figures.gap = (logits[the] - logits[wrong]).item()
    answer: list[int] = []
    while len(answer) < 20 and int(logits.argmax()) not in reader.eos_token_ids:
        answer.append(int(logits.argmax()))
        logits = reader.step([(0, answer[-1:], len(prompt) + len(answer) - 1)])[0]
    figures.answer = text.tokenizer.decode(answer)


def fill_contexts(reader: Reader) -> None:
    """What the timed steps read."""
    for number in range(max(BATCHES)):
        reader.step([(number, TIMED[:CONTEXT], 0)])


def time_steps(reader: Reader, figures: Measured) -> None:
    """One sample of each duration. The prompt leaves the first sequence's context as it was."""
    began = time.perf_counter()
    reader.step([(0, TIMED, 0)])
    figures.prompt_ms.append((time.perf_counter() - began) * 1000)
    for size in BATCHES:
        began = time.perf_counter()
        reader.step([(number, TIMED[CONTEXT : CONTEXT + 1], CONTEXT) for number in range(size)])
        figures.step_ms[size].append((time.perf_counter() - began) * 1000)


def report(measured: dict[str, Measured]) -> None:
    for name, figures in measured.items():
        print(f"{name}: {figures.kernels}")
    steps = "".join(f"{f'step of {size}, ms':>16}" for size in BATCHES)
    print(
        f"{'format':<10}{'KL mean':>10}{'top-1 equal':>13}{'perplexity':>12}{'gap':>8}{'answer':>8}"
        f"{f'{PROMPT} tokens, ms':>18}{steps}"
    )
    for name, figures in measured.items():
        kl, same = statistics.mean(figures.kl), statistics.mean(figures.same_top)
        perplexity = torch.tensor(figures.loss).mean().exp().item()
        durations = "".join(f"{statistics.median(figures.step_ms[size]):>16.0f}" for size in BATCHES)
        print(
            f"{name:<10}{kl:>10.1e}{same:>13.1%}{perplexity:>12.3f}{figures.gap:>8.3f}"
            f"{'right' if figures.answer == ANSWER else 'wrong':>8}"
            f"{statistics.median(figures.prompt_ms):>18.0f}{durations}"
        )


if __name__ == "__main__":
    main()
