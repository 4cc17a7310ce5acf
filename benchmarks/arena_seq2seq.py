"""A sequence-to-sequence LSTM with attention over sentences of varying length, unrolled word by word as in Chainer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

VOCABULARY = 4000
UNITS = 256
SHORTEST, LONGEST = 5, 30  # words; the paper cuts sentences at 50
BUCKET = 5  # lengths are padded up to a multiple of this many words, as batching by length does
MOST_WORDS = 60  # of a translation


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
