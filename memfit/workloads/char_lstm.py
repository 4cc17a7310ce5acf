"""Workload char_lstm: torch's own LSTM, one kernel for all time steps, which predicts the next character of a text."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from memfit.workloads.parts import Options, Parts, cross_entropy

CHARACTERS = 128  # ASCII
_WORDS = (
    "a the one no every some model memory layer tensor step kernel device host plan reads writes keeps drops "
    "copies recomputes fits grows waits and while before after small large slow fast old new again often "
    "seldom"
)


class CharacterLSTM(nn.Module):
    """(batch, steps) of characters -> (batch, CHARACTERS, steps)."""

    def __init__(self, *, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(characters))[0]).transpose(1, 2)


def corpus(length: int) -> str:
    """Return a text of at least `length` characters: sentences of words drawn at random, the same in every call.

    >>> corpus(20)
    'small reads tensor drops plan large kernel.'
    """
    draw, words = random.Random(0), _WORDS.split()
    text = ""
    while len(text) < length:
        text += ("\n" if text else "") + " ".join(draw.choices(words, k=draw.randint(4, 9))) + "."
    return text


def make(_name: str, options: Options) -> Parts:
    """Return the LSTM, cross entropy over characters, and a batch of the corpus with the next characters as labels."""
    batch, steps = options["batch"], options["steps"]
    codes = torch.tensor(list(corpus(batch * steps + 1).encode("ascii")[: batch * steps + 1]))
    return Parts(
        model=CharacterLSTM(layers=options["layers"], width=options["width"]),
        loss=cross_entropy(options),
        batch=(codes[:-1].view(batch, steps), codes[1:].view(batch, steps)),
    )


def places(model: nn.Module, _granularity: str) -> list[nn.Module]:
    """Return the LSTM: one kernel, so that there is nothing smaller."""
    assert isinstance(model, CharacterLSTM)
    return [model.lstm]
