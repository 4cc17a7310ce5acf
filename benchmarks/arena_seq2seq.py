"""A sequence-to-sequence LSTM with attention over sentences of varying length, unrolled word by word as in Chainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

VOCABULARY = 4000
UNITS = 256
SHORTEST, LONGEST = 5, 30  # words; the paper cuts sentences at 50
BUCKET = 5  # lengths are padded up to a multiple of this many words, as batching by length does
MOST_WORDS = 60  # of a translation
PAPERS_VOCABULARY, PAPERS_UNITS, PAPERS_LAYERS, PAPERS_WORDS = 40_000, 1024, 3, 50  # of Chainer's example
_MEDIAN_WORDS, _SPREAD, _RATIO_SPREAD = (
    20.0,
    0.6,
    0.15,
)  # of drawn sentences: log-normal, and the target's by the source's


class Seq2seq(nn.Module):
    """Encoder and decoder of one LSTM cell each; the decoder attends to all of the encoder's states (dot product)."""

    def __init__(self, vocabulary: int = VOCABULARY, units: int = UNITS) -> None:
        super().__init__()
        self.source_words = nn.Embedding(vocabulary, units)
        self.target_words = nn.Embedding(vocabulary, units)
        self.encoder = nn.LSTMCell(units, units)
        self.decoder = nn.LSTMCell(2 * units, units)
        self.output = nn.Linear(2 * units, vocabulary)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the states after each word, [words, batch, units], and the last."""
        embedded = self.source_words(source)
        state = (embedded.new_zeros(source.shape[1], UNITS), embedded.new_zeros(source.shape[1], UNITS))
        states: list[torch.Tensor] = []
        for word in embedded:
            state = self.encoder(word, state)
            states.append(state[0])
        return torch.stack(states), state

    def decode(
        self, word: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor], states: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the logits of the next word, and the state."""
        weights = torch.softmax((states * state[0]).sum(-1), dim=0)
        context = (weights.unsqueeze(-1) * states).sum(0)
        state = self.decoder(torch.cat([self.target_words(word), context], dim=-1), state)
        return self.output(torch.cat([state[0], context], dim=-1)), state

    def loss(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each next word; source and target are [words, batch]."""
        states, state = self.encode(source)
        losses: list[torch.Tensor] = []
        for word, following in pairwise(target):
            logits, state = self.decode(word, state, states)
            losses.append(nn.functional.cross_entropy(logits, following))
        return torch.stack(losses).mean()

    def trainer(self, learning_rate: float) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return a training step with SGD."""
        optimizer = torch.optim.SGD(self.parameters(), lr=learning_rate)

        def train(source: torch.Tensor, target: torch.Tensor) -> None:
            optimizer.zero_grad()
            self.loss(source, target).backward()
            optimizer.step()

        return train

    @torch.inference_mode()
    def translate(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Generate MOST_WORDS words, each the likeliest, as the paper's script generates always 100."""
        states, state = self.encode(source)
        word = target[0]
        for _ in range(MOST_WORDS):
            logits, state = self.decode(word, state, states)
            word = logits.argmax(-1)


def sentences(batch: int, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return `count` batches of source and target words; all of a batch have the same, padded, length."""
    generator = torch.Generator().manual_seed(seed)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(count):
        words = torch.randint(SHORTEST, LONGEST + 1, (2,), generator=generator)
        source, target = (-(-int(length) // BUCKET) * BUCKET for length in words)
        pairs.append(
            (
                torch.randint(0, VOCABULARY, (source, batch), generator=generator),
                torch.randint(0, VOCABULARY, (target, batch), generator=generator),
            )
        )
    return pairs


class Sentences(NamedTuple):
    """Pairs of sentences of different lengths, without padding.

    Attributes:
        source, target: by place in the sentence, the words of those that are so long, the longest sentence first.
        order: of the target's sentences among the source's.
    """

    source: tuple[torch.Tensor, ...]
    target: tuple[torch.Tensor, ...]
    order: torch.Tensor


class PapersSeq2seq(nn.Module):
    """Encoder and decoder of three LSTM layers each, as Chainer's example has them: sentences end when they end."""

    def __init__(self, vocabulary: int = PAPERS_VOCABULARY, units: int = PAPERS_UNITS) -> None:
        super().__init__()
        self.source_words, self.target_words = (nn.Embedding(vocabulary, units) for _ in range(2))
        self.encoder, self.decoder = (
            nn.ModuleList(nn.LSTMCell(units, units) for _ in range(PAPERS_LAYERS)) for _ in range(2)
        )
        self.output = nn.Linear(units, vocabulary)

    def loss_of(self, batch: Sentences) -> torch.Tensor:
        """Return the mean cross entropy of each next word; the logits of all words are made at once."""
        state = [torch.index_select(each, 1, batch.order) for each in self.encode(batch.source)]
        outputs: list[torch.Tensor] = []
        for word, following in pairwise(batch.target):
            inputs = self.target_words(word[: len(following)])
            output, state = _layers(self.decoder, inputs, [each[:, : len(following)] for each in state])
            outputs.append(output)
        return nn.functional.cross_entropy(self.output(torch.cat(outputs)), torch.cat(batch.target[1:]))

    def encode(self, source: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each layer's last states of all sentences, [layers, sentences, units], hidden ones and cells."""
        zeros = self.output.weight.new_zeros(PAPERS_LAYERS, len(source[0]), self.output.in_features)
        state, ended = [zeros, zeros], list[list[torch.Tensor]]()
        for word in source:
            ended.append([each[:, len(word) :] for each in state])
            _, state = _layers(self.encoder, self.source_words(word), [each[:, : len(word)] for each in state])
        return [torch.cat([last, *reversed(parts)], 1) for last, *parts in zip(state, *ended, strict=True)]

    @staticmethod
    def generated(count: int) -> Callable[[PapersSeq2seq, Sentences], torch.Tensor]:
        """Return what generates so many words, each the likeliest, and returns the sum of their logits."""

        def sum_of(model: PapersSeq2seq, batch: Sentences) -> torch.Tensor:
            state, word, total = model.encode(batch.source), batch.target[0], torch.zeros(())
            for _ in range(count):
                output, state = _layers(model.decoder, model.target_words(word), state)
                logits = model.output(output)
                word, total = logits.argmax(-1), total + logits.sum()
            return total

        return sum_of


def _layers(
    cells: nn.ModuleList, inputs: torch.Tensor, state: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    hidden, kept = list[torch.Tensor](), list[torch.Tensor]()
    for cell, before, held in zip(cells, *state, strict=True):
        inputs, memory = cell(inputs, (before, held))
        hidden.append(inputs)
        kept.append(memory)
    return inputs, [torch.stack(hidden), torch.stack(kept)]


def drawn_lengths(batch: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Return lengths of the source's and target's sentences, up to 50 words."""
    found: list[tuple[int, int]] = []
    for one, other in torch.randn(batch, 2, generator=generator).tolist():
        source = _MEDIAN_WORDS * math.exp(_SPREAD * one)
        target = source * (1 + _RATIO_SPREAD * other)
        found.append((min(max(round(source), 1), PAPERS_WORDS), min(max(round(target), 1), PAPERS_WORDS)))
    return found


def sorted_words(lengths: Sequence[tuple[int, int]]) -> Sentences:
    """Return words, all of them the same, of sentences of these lengths; a target has one more, its end."""
    by_source = sorted(lengths, reverse=True)
    targets = [target + 1 for _, target in by_source]
    order = sorted(range(len(targets)), key=lambda number: -targets[number])
    return Sentences(
        source=_by_place([source for source, _ in by_source]), target=_by_place(targets), order=torch.tensor(order)
    )


def _by_place(lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    counts = [sum(length > place for length in lengths) for place in range(max(lengths))]
    return tuple(torch.zeros(count, dtype=torch.int64) for count in counts)
