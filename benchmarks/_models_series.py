"""Audio, time series, scans and other models of sequences."""

from __future__ import annotations

import math

import torch
from _models_kit import TOKENS, Make, cross_entropy, ids, itself, labels, mlp, plain, square
from torch import Tensor, nn
from torch.nn import functional


class Temporal(nn.Module):
    """A TCN: dilated causal convolutions with weight normalization (Bai et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            norm(nn.Conv1d(16 if depth else 3, 16, 3, dilation=1 << depth)) for depth in range(4)
        )
        self.out = nn.Conv1d(16, 3, 1)

    def forward(self, values: Tensor) -> Tensor:
        """Map series `[batch, 3, time]` to series."""
        for depth, layer in enumerate(self.layers):
            found = functional.dropout(layer(functional.pad(values, (2 << depth, 0))).relu(), 0.1, self.training)
            values = found + values if depth else found
        return self.out(values)


class Stacks(nn.Module):
    """N-BEATS: blocks that subtract what they explain (Oreshkin et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(32, 64, 64, 64, 40) for _ in range(4))

    def forward(self, past: Tensor) -> Tensor:
        """Forecast 8 values of series `[batch, 32]`."""
        forecast = torch.zeros(())
        for block in self.blocks:
            back, ahead = block(past).split([32, 8], 1)
            past, forecast = past - back, forecast + ahead
        return forecast


class Forecast(nn.Module):
    """DeepAR: a recurrent cell in a loop, with a Gaussian likelihood (Salinas et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, 32), nn.Linear(32, 2)

    def forward(self, series: Tensor) -> Tensor:
        """Return the loss of series `[batch, time]`."""
        state = torch.zeros(len(series), 32), torch.zeros(len(series), 32)
        total = torch.zeros(())
        for value, later in zip(series.T, series.T[1:], strict=False):
            state = self.cell(value[:, None], state)
            mean, spread = self.out(state[0]).unbind(1)
            total = total - torch.distributions.Normal(mean, functional.softplus(spread) + 1e-3).log_prob(later).mean()
        return total


class Speech(nn.Module):
    """A recognizer of speech: convolutions, a recurrent network in two directions, CTC (Deep Speech 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(16, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.Hardtanh(0, 20))
        self.inner, self.out = nn.GRU(32, 24, 1, batch_first=True, bidirectional=True), nn.Linear(48, 20)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of spectra `[batch, 16, time]` and letters."""
        spectra, letters = batch
        states, _ = self.inner(self.front(spectra).transpose(1, 2))
        found = self.out(states).log_softmax(2).transpose(0, 1)
        lengths = torch.full((found.shape[1],), found.shape[0])
        return functional.ctc_loss(found, letters, lengths, torch.full_like(lengths, letters.shape[1]))


class Spectrogram(nn.Module):
    """A classifier of sound: a spectrogram inside, masks of bands and times, convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.inner = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
        self.out = nn.Linear(16, 10)

    def forward(self, waves: Tensor) -> Tensor:
        """Return logits of waves `[batch, time]`."""
        power = torch.stft(waves, 64, 16, window=self.window, return_complex=True).abs().square()
        power = power * (torch.rand(len(waves), power.shape[1], 1) > 0.1)
        return self.out(self.inner((power + 1e-6).log()[:, None]).mean((2, 3)))


class Separation(nn.Module):
    """Conv-TasNet with permutation-invariant SI-SNR (Luo and Mesgarani 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv1d(1, 32, 16, 8, bias=False), nn.ConvTranspose1d(32, 1, 16, 8, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(32, 48, 1), nn.PReLU(), nn.GroupNorm(1, 48),
                nn.Conv1d(48, 48, 3, padding=1 << depth, dilation=1 << depth, groups=48), nn.PReLU(),
                nn.Conv1d(48, 32, 1),
            )
            for depth in range(3)
        )  # fmt: skip
        self.masks = nn.Conv1d(32, 64, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of mixtures `[batch, time]` of sources `[batch, 2, time]`."""
        mixed, sources = batch
        code = values = self.encode(mixed[:, None]).relu()
        for block in self.blocks:
            values = values + block(values)
        masks = self.masks(values).view(-1, 2, 32, code.shape[2]).sigmoid()
        found = self.decode((masks * code[:, None]).flatten(0, 1)).view_as(sources)
        pairs = [(found - sources[:, list(order)]).square().mean((1, 2)) for order in ((0, 1), (1, 0))]
        return torch.stack(pairs).amin(0).mean()


class Vocoder(nn.Module):
    """A vocoder as HiFi-GAN's generator, with a loss of spectra (Kong et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.up = nn.ModuleList(norm(nn.ConvTranspose1d(32 >> n, 16 >> n, 8, 4, 2)) for n in range(2))
        self.mix = nn.ModuleList(norm(nn.Conv1d(16 >> n, 16 >> n, 3, padding=1)) for n in range(2))
        self.out = norm(nn.Conv1d(8, 1, 7, padding=3))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of spectra `[batch, 32, time]` and waves."""
        values, waves = batch
        for up, mix in zip(self.up, self.mix, strict=True):
            values = up(functional.leaky_relu(values, 0.1))
            values = values + mix(functional.leaky_relu(values, 0.1))
        found, loss = self.out(values).tanh()[:, 0], torch.zeros(())
        for size in (64, 32):
            ours, theirs = (torch.stft(each, size, return_complex=True, window=torch.hann_window(size)).abs()
                            for each in (found, waves))  # fmt: skip
            loss = loss + functional.l1_loss(ours, theirs)
        return loss


class Selective(nn.Module):
    """Mamba: a selective state space by a scan in a loop (Gu and Dao 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.split, self.out = nn.Embedding(TOKENS, 32), nn.Linear(32, 64), nn.Linear(32, TOKENS)
        self.conv, self.rates = nn.Conv1d(32, 32, 4, groups=32, padding=3), nn.Linear(32, 32 + 2 * 8)
        self.decay = nn.Parameter(torch.arange(1.0, 9.0).log().repeat(32, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, time, tokens]`."""
        values, gates = self.split(self.embed(tokens)).chunk(2, 2)
        values = functional.silu(self.conv(values.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2))
        steps, entries, exits = self.rates(values).split([32, 8, 8], 2)
        steps = functional.softplus(steps)
        decays = (-steps[..., None] * self.decay.exp()).exp()
        inputs = (steps * values)[..., None] * entries[:, :, None]
        state, found = torch.zeros(len(tokens), 32, 8), []
        for time in range(tokens.shape[1]):
            state = decays[:, time] * state + inputs[:, time]
            found.append((state * exits[:, time, None]).sum(2))
        return self.out(torch.stack(found, 1) * functional.silu(gates))


class Receptance(nn.Module):
    """RWKV: time mixing by decaying sums (Peng et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(TOKENS, 32), nn.Linear(32, TOKENS)
        self.keys, self.values, self.receptance = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.mix, self.decay, self.first = (nn.Parameter(torch.rand(32)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, time, tokens]`."""
        inputs = self.embed(tokens)
        shifted = torch.lerp(functional.pad(inputs, (0, 0, 1, -1)), inputs, self.mix)
        keys, values = self.keys(shifted), self.values(shifted)
        above = below = torch.zeros_like(keys[:, 0])
        most, found = torch.full_like(above, -1e30), []
        for time in range(tokens.shape[1]):
            key, value = keys[:, time], values[:, time]
            top = torch.maximum(most, self.first + key)
            old, new = (most - top).exp(), (self.first + key - top).exp()
            found.append((old * above + new * value) / (old * below + new))
            top = torch.maximum(most - self.decay.exp(), key)
            old, new = (most - self.decay.exp() - top).exp(), (key - top).exp()
            above, below, most = old * above + new * value, old * below + new, top
        return self.out(self.receptance(shifted).sigmoid() * torch.stack(found, 1))


class Structured(nn.Module):
    """S4D: a diagonal state space as a convolution by FFT, with complex parameters (Gu et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(1, 24), nn.Linear(24, 10)
        self.poles = nn.Parameter(torch.complex(-torch.rand(24, 8), math.pi * torch.arange(8.0).repeat(24, 1)))
        self.weights = nn.Parameter(torch.randn(24, 8, dtype=torch.cfloat))
        self.step = nn.Parameter(torch.full((24, 1), -4.0))

    def forward(self, series: Tensor) -> Tensor:
        """Return logits of series `[batch, time, 1]`."""
        values, length = self.lift(series).transpose(1, 2), series.shape[1]
        poles = self.poles * self.step.exp()
        powers = (poles[..., None] * torch.arange(length)).exp()
        kernel = 2 * torch.einsum("hn,hnl->hl", self.weights * (poles.exp() - 1) / self.poles, powers).real
        spectrum = torch.fft.rfft(values, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        return self.out(functional.gelu(torch.fft.irfft(spectrum, 2 * length)[..., :length]).mean(2))


class Hyena(nn.Module):
    """Hyena: implicit long filters and gates (Poli et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.out = nn.Embedding(TOKENS, 32), nn.Linear(32, 96), nn.Linear(32, TOKENS)
        self.short, self.filters = nn.Conv1d(96, 96, 3, padding=2, groups=96), mlp(5, 32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, time, tokens]`."""
        length = tokens.shape[1]
        values = self.short(self.project(self.embed(tokens)).transpose(1, 2))[..., :length]
        left, right, values = values.chunk(3, 1)
        times = torch.linspace(0, 1, length)[:, None]
        waves = torch.cat(
            [times, (times * torch.tensor([3.0, 6.0])).sin(), (times * torch.tensor([3.0, 6.0])).cos()], 1
        )
        kernel = (self.filters(waves) * (-3 * times).exp()).T
        spectrum = torch.fft.rfft(values * right, 2 * length) * torch.fft.rfft(kernel, 2 * length)
        return self.out((left * torch.fft.irfft(spectrum, 2 * length)[..., :length]).transpose(1, 2))


class Exponential(nn.Module):
    """The sLSTM cell of xLSTM: exponential gates with a stabilizer, in a loop (Beck et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gates, self.again = (
            nn.Embedding(TOKENS, 32),
            nn.Linear(32, 128),
            nn.Linear(32, 128, bias=False),
        )
        self.norm, self.out = nn.GroupNorm(4, 32), nn.Linear(32, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, time, tokens]`."""
        gates = self.gates(self.embed(tokens))
        hidden = cell = norm = most = torch.zeros(len(tokens), 32)
        found = []
        for time in range(tokens.shape[1]):
            enter, forget, value, leave = (gates[:, time] + self.again(hidden)).chunk(4, 1)
            top = torch.maximum(functional.logsigmoid(forget) + most, enter)
            enter, forget = (enter - top).exp(), (functional.logsigmoid(forget) + most - top).exp()
            cell, norm, most = forget * cell + enter * value.tanh(), forget * norm + enter, top
            hidden = leave.sigmoid() * cell / norm.clamp(min=1)
            found.append(self.norm(hidden))
        return self.out(torch.stack(found, 1))


class Linear(nn.Module):
    """Linear attention by cumulative sums (Katharopoulos et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.out = nn.Embedding(TOKENS, 32), nn.Linear(32, 96), nn.Linear(32, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, time, tokens]`."""
        query, key, value = self.project(self.embed(tokens)).view(*tokens.shape, 3, 4, 8).unbind(2)
        query, key = functional.elu(query) + 1, functional.elu(key) + 1
        sums = torch.einsum("bthk,bthv->bthkv", key, value).cumsum(1)
        found = torch.einsum("bthk,bthkv->bthv", query, sums) / (query * key.cumsum(1)).sum(3, keepdim=True)
        return self.out(found.flatten(2))


class Translator(nn.Module):
    """A recurrent translator with additive attention and teacher forcing (Bahdanau et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encode, self.cell = (
            nn.Embedding(TOKENS, 32),
            nn.GRU(32, 32, batch_first=True),
            nn.GRUCell(64, 32),
        )
        self.query, self.key, self.score = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.out = nn.Linear(32, TOKENS)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of pairs of sentences."""
        source, target = batch
        states, last = self.encode(self.embed(source))
        keys, state, found = self.key(states), last[0], []
        for time in range(11):
            weights = self.score((keys + self.query(state)[:, None]).tanh()).softmax(1)
            state = self.cell(torch.cat([self.embed(target[:, time]), (weights * states).sum(1)], 1), state)
            found.append(self.out(state))
        return functional.cross_entropy(torch.stack(found, 1).flatten(0, 1), target[:, 1:12].flatten())


class Tagger(nn.Module):
    """A tagger with a conditional random field, whose partition function is a scan (Lample et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(TOKENS, 32), nn.LSTM(32, 24, batch_first=True, bidirectional=True)
        self.out, self.moves = nn.Linear(48, 7), nn.Parameter(torch.randn(7, 7))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of tokens and tags."""
        tokens, tags = batch
        scores = self.out(self.inner(self.embed(tokens))[0])
        path = scores.gather(2, tags[..., None]).sum((1, 2)) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        total = scores[:, 0]
        for time in range(1, tokens.shape[1]):
            total = (total[:, :, None] + self.moves).logsumexp(1) + scores[:, time]
        return (total.logsumexp(1) - path).mean()


class Packed(nn.Module):
    """A classifier of sentences of several lengths, packed for its recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.out = nn.Embedding(TOKENS, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits of tokens with lengths."""
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(batch[0]), batch[1], True, False)
        return self.out(self.inner(packed)[1][0])


def _words(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _forecast(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(32 * rows, 32), torch.randn(32 * rows, 8)


def _packed(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[:2]), batch[2])


SERIES: dict[str, Make] = {
    "tcn": plain(Temporal, square, lambda rows: (torch.randn(rows, 3, 128), torch.randn(rows, 3, 128))),
    "n-beats": plain(Stacks, square, _forecast),
    "deepar": plain(Forecast, itself, lambda rows: torch.randn(4 * rows, 24)),
    "speech, ctc": plain(Speech, itself, lambda rows: (torch.randn(rows, 16, 64), torch.randint(1, 20, (rows, 8)))),
    "spectrograms": plain(Spectrogram, cross_entropy, lambda rows: (torch.randn(rows, 1024), labels(rows))),
    "conv-tasnet": plain(Separation, itself, lambda rows: (torch.randn(rows, 1024), torch.randn(rows, 2, 1024))),
    "hifi-gan": plain(Vocoder, itself, lambda rows: (torch.randn(rows, 32, 32), torch.randn(rows, 512))),
    "mamba scan": plain(Selective, _words, ids),
    "rwkv": plain(Receptance, _words, ids),
    "s4": plain(Structured, cross_entropy, lambda rows: (torch.randn(rows, 64, 1), labels(rows))),
    "hyena": plain(Hyena, _words, ids),
    "xlstm cell": plain(Exponential, _words, ids),
    "linear attention": plain(Linear, _words, ids),
    "recurrent translator": plain(Translator, itself, lambda rows: (ids(rows), ids(rows))),
    "tagger, crf": plain(Tagger, itself, lambda rows: (ids(rows), torch.randint(0, 7, (rows, 32)))),
    "packed gru": plain(
        Packed, _packed, lambda rows: (ids(rows), torch.randint(5, 33, (rows,)), labels(rows)), rows=16
    ),
}
"""Makers of models, by name."""
